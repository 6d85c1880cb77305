"""Owns the record of the long tail: a JSON file with all runs and rates, to which later rounds are added."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from long_tail.bars import Rates
from long_tail.runs import RankRun, Run
from sgl_batch.errors import ConfigError


@dataclass(slots=True, kw_only=True)
class Record:
    """All that was measured with the same settings.

    Attributes:
        settings: What all rounds have in common, as JSON.
        runs: In the order of time.
        rates: Of the cores, by round.
        sessions: Of each command: its arguments, machine, source and date.
    """

    settings: Mapping[str, Any]
    runs: list[Run] = field(default_factory=list)
    rates: list[Rates] = field(default_factory=list)
    sessions: list[Mapping[str, Any]] = field(default_factory=list)

    @property
    def last_round(self) -> int:
        """The number of the last round; 0 without any."""
        return max((run.round for run in self.runs), default=0)

    def of(self, case: str) -> list[Run]:
        """Return the runs of a case."""
        return [run for run in self.runs if run.case == case]

    def write(self, path: Path) -> None:
        """Write it to a file, completely or not at all."""
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")
        partial.replace(path)


def read_record(path: Path, settings: Mapping[str, Any]) -> Record:
    """Return the record of a file, or an empty one. Raises ConfigError where it was measured with other settings."""
    if not path.exists():
        return Record(settings=settings)
    found = json.loads(path.read_text(encoding="utf-8"))
    other = [name for name in settings if found["settings"].get(name) != settings[name]]
    if other:
        name = other[0]
        raise ConfigError(
            f"{path} was measured with {name} {found['settings'].get(name)!r}, and now it is {settings[name]!r}; "
            "name another directory by --out"
        )
    return Record(
        settings=settings,
        runs=[_run(one) for one in found["runs"]],
        rates=[_rates(one) for one in found["rates"]],
        sessions=found["sessions"],
    )


def _run(one: Mapping[str, Any]) -> Run:
    return Run(**{**one, "ranks": [_rank(rank) for rank in one["ranks"]]})


def _rank(one: Mapping[str, Any]) -> RankRun:
    return RankRun(**{**one, "samples": [(moment, idle) for moment, idle in one["samples"]]})


def _rates(one: Mapping[str, Any]) -> Rates:
    return Rates(round=one["round"], read=_pair(one["read"]), products=_pair(one["products"]))


def _pair(values: Sequence[float]) -> tuple[float, float]:
    alone, together = values
    return alone, together
