"""Owns the rows of the doctor's table: their form, and whether an engine can run with them."""

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
    """The result of a check. `WARNING`: slower, or less than possible. `MISSING`: not installed or not present."""

    OK = "ok"
    WARNING = "warning"
    MISSING = "missing"
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One row of the table. `required`: no engine runs here without it. `values`: the numbers, for programs."""

    check: str
    state: State
    found: str
    remedy: str = ""
    required: bool = False
    values: Mapping[str, Any] = field(default_factory=dict)

    @property
    def prevents_run(self) -> bool:
        """Whether this row prevents every engine from running."""
        return self.required and self.state in (State.MISSING, State.FAILED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One check. `rows` returns its rows; it runs in a child process, and may raise, hang or end that process.

    `remedy`, `required`: those of the row where it does so. `after`: a check whose answer this one needs.
    """

    name: str
    rows: Callable[[Machine], Sequence[Row]]
    remedy: str = ""
    required: bool = False
    timeout_s: float = 10.0
    after: str = ""

    def failed(self, why: str) -> Row:
        """Return the row of a check that gave no rows."""
        return Row(check=self.name, state=State.FAILED, found=why, remedy=self.remedy, required=self.required)


def can_run(rows: Iterable[Row]) -> bool:
    """Return whether an engine can run on a machine with these rows."""
    return not any(row.prevents_run for row in rows)


def table(rows: Sequence[Row]) -> str:
    """Return the rows as a table for a terminal. A remedy stands below what was found."""
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
    """Return the rows as JSON."""
    listed = [asdict(row) for row in rows]
    return {"format": FORMAT, "can_run": can_run(rows), "took_s": round(took_s, 3), "rows": listed}
