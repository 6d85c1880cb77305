"""Owns the table of outcomes: one line for each stage, in order."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from bringup.state import FAILED, NOT_RUN, OK, Outcome

HEAD = ("stage", "state", "seconds", "tokens equal", "last error line, or remark")
REMARK_WIDTH = 160


def table(names: Iterable[str], outcomes: Mapping[str, Outcome]) -> str:
    """Return the table as text, with a last line of counts."""
    rows = [HEAD, *(_row(name, outcomes.get(name, Outcome())) for name in names)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEAD) - 1)]
    lines = [
        "  ".join([*(cell.ljust(width) for cell, width in zip(row[:-1], widths, strict=True)), row[-1]]).rstrip()
        for row in rows
    ]
    states = [row[1] for row in rows[1:]]
    counts = ", ".join(f"{states.count(state)} {state}" for state in (OK, FAILED, NOT_RUN))
    return "\n".join([lines[0], "  ".join("-" * width for width in widths), *lines[1:], counts])


def _row(name: str, outcome: Outcome) -> tuple[str, ...]:
    seconds = "" if outcome.state == NOT_RUN else f"{outcome.seconds:.0f}"
    remark = outcome.remark if len(outcome.remark) <= REMARK_WIDTH else outcome.remark[: REMARK_WIDTH - 3] + "..."
    return name, outcome.state, seconds, outcome.tokens, remark
