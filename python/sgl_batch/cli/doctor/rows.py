"""Owns the rows of the doctor's table: their form, and whether an engine can run with them. It checks nothing."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

from sgl_batch.cli.doctor.machine import Machine

FORMAT = "sgl_batch.doctor/1"
_FOUND_WIDTH = 88


class State(StrEnum):
    """`WARNING`: it works, slower or with less than it could. `MISSING`: not installed, or not there."""

    OK = "ok"
    WARNING = "warning"
    MISSING = "missing"
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of the table. `required`: no engine runs here without it. `values`: numbers, for programs."""

    check: str
    state: State
    found: str
    remedy: str = ""
    required: bool = False
    values: Mapping[str, Any] = field(default_factory=dict)

    @property
    def prevents_run(self) -> bool:
        """Whether no engine can run because of this row."""
        return self.required and self.state in (State.MISSING, State.FAILED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """A function that gives the rows of one check. It may raise, hang or end its process: it runs in a child.

    `remedy`, `required`: those of its row where it does. `after`: a check without whose answer this one is not run.
    """

    name: str
    rows: Callable[[Machine], Sequence[Row]]
    remedy: str = ""
    required: bool = False
    timeout_s: float = 10.0
    after: str = ""

    def failed(self, why: str) -> Row:
        """The row of a check that gave none."""
        return Row(check=self.name, state=State.FAILED, found=why, remedy=self.remedy, required=self.required)


def can_run(rows: Iterable[Row]) -> bool:
    """Whether an engine can run on a machine with these rows."""
    return not any(row.prevents_run for row in rows)


def table(rows: Sequence[Row]) -> str:
    """The rows for a terminal; a remedy stands below what was found."""
    width = max(len(row.check) for row in rows)
    states = max(len(state) for state in State)
    lines = [f"{'check':<{width}}  {'state':<{states}}  found"]
    for row in rows:
        found = textwrap.wrap(row.found, _FOUND_WIDTH) or [""]
        remedy = textwrap.wrap(f"-> {row.remedy}", _FOUND_WIDTH) if row.remedy else []
        lines.append(f"{row.check:<{width}}  {row.state:<{states}}  {found[0]}")
        lines += [" " * (width + states + 4) + text for text in (*found[1:], *remedy)]
    return "\n".join(lines) + "\n"


def as_json(rows: Sequence[Row], took_s: float) -> dict[str, Any]:
    """The rows for a program."""
    listed = [asdict(row) for row in rows]
    return {"format": FORMAT, "can_run": can_run(rows), "took_s": round(took_s, 3), "rows": listed}
