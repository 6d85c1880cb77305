"""Estimates how long the requests of an input file are, from a sample of its lines, for the plan of a run.

It reads at most some hundred lines. Outputs count with their limit, max_tokens. Lines that cannot be read count as
lines; the run refuses them later.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

from sgl_batch.jobs.request_lengths import RequestLengths, TextTokens, by_bytes
from sgl_batch.jobs.tables.row_lines import RowRules, first_lines
from sgl_batch.jobs.tables.sources import Table
from sgl_batch.planner.workload import Request, Workload

_WHOLE_BYTES = 1 << 20
_PLACES, _LINES_AT_ONCE = 64, 4
_LONGEST_LINE = 1 << 20


def sample_workload(path: Path, limit: int | None, tokens: TextTokens | None = None) -> Workload | None:
    """Return the batch of an input file, or None where no sampled line is a request.

    `limit`: the most lines that are run. `tokens`: counts the tokens of a text; None for four bytes a token.
    """
    with path.open("rb") as file:
        size = file.seek(0, 2)
        if size <= _WHOLE_BYTES:
            file.seek(0)
            every = [line for line in file if line.strip()]
            num_lines = len(every)
            most = _PLACES * _LINES_AT_ONCE
            lines = every if num_lines <= most else [every[index * num_lines // most] for index in range(most)]
        else:
            lines = list(_spread(file, size))
            num_lines = round(size * len(lines) / max(sum(map(len, lines)), 1))
    return _workload(lines, num_lines, limit, tokens, of="lines")


def sample_table(path: Path, rules: RowRules, limit: int | None, tokens: TextTokens | None = None) -> Workload | None:
    """Return the batch of a table, as its first rows show it. Arguments are as in `sample_workload`.

    `rules`: which columns make a line. Raises ConfigError for a table that cannot be read.
    """
    table = Table(path)
    lines = list(first_lines(table, rules, _PLACES * _LINES_AT_ONCE))
    return _workload(lines, table.count_rows(), limit, tokens, of="rows")


def _workload(
    lines: Sequence[bytes], num_lines: int, limit: int | None, tokens: TextTokens | None, *, of: str
) -> Workload | None:
    lengths = RequestLengths(tokens or by_bytes)
    found = [_requests(line, lengths) for line in lines]
    requests = [one for some in found for one in some]
    if not requests:
        return None
    each = len(requests) / sum(1 for some in found if some)
    count = round(each * min(num_lines, limit or num_lines))
    how = "" if tokens else ", four bytes a token"
    source = f"estimated from {len(lines):,} {of} of the input{how}"
    return Workload(requests=requests, count=max(count, 1), source=source)


def _spread(file: BinaryIO, size: int) -> Iterator[bytes]:
    """Yield a few lines from each of evenly spaced places."""
    for place in range(_PLACES):
        file.seek(place * size // _PLACES)
        if place:
            file.readline()  # the rest of a line
        for _ in range(_LINES_AT_ONCE):
            line = file.readline(_LONGEST_LINE)
            if line.strip():
                yield line


def _requests(line: bytes, lengths: RequestLengths) -> list[Request]:
    """Return a request for each choice of a line; nothing for a line that cannot be read."""
    try:
        body = json.loads(line)["body"]
    except (LookupError, TypeError, ValueError, RecursionError):
        return []
    return lengths.requests(body)
