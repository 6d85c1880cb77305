"""Makes the table of instances. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

_HEAD = ("name", "node", "state", "cores", "GPUs", "start", "in flight", "answered", "lines/s")
_LEFT = 3  # columns of words; the others are numbers


def table(rows: Iterable[Mapping[str, Any]]) -> str:
    """Return a table with a row for each instance, and below it why those are not ready that are not."""
    shown = list(rows)
    cells = [_HEAD, *map(_cells, shown)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(_HEAD))]
    lines = [
        "  ".join(
            cell.ljust(width) if column < _LEFT else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in cells
    ]
    return "\n".join([*lines, *(f"{row['name']}: {row['message']}" for row in shown if row["message"])])


def _cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    return (
        str(row["name"]),
        str(row["node"] or "-"),
        str(row["phase"]),
        f"{row['cores']}",
        f"{row['gpus']}",
        f"{row['incarnation']}",
        f"{row['in_flight']:,}",
        f"{row['answered']:,}",
        f"{row['lines_per_s']:,.1f}" if row["lines_per_s"] else "-",
    )
