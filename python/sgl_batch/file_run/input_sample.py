"""Estimates how long the requests of an input file are, from a sample of its lines, for the plan of a run.

It reads at most some hundred lines. Outputs count with their limit, max_tokens. Lines that cannot be read count as
lines; the run refuses them later.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from sgl_batch.file_run.text_tokens import TextTokens, by_bytes
from sgl_batch.jobs.tables.row_lines import RowRules, first_lines
from sgl_batch.jobs.tables.sources import Table
from sgl_batch.planner.workload import DEFAULT_OUTPUT, Request, Workload

_MESSAGE_TOKENS = 4  # of a chat template, for each message
# Where a line has no limit: that of /v1/completions, and for a chat, which has none, the planner's usual output.
_COMPLETION_OUTPUT = 16
_WHOLE_BYTES = 1 << 20
_PLACES, _LINES_AT_ONCE = 64, 4
_LONGEST_LINE = 1 << 20
_MOST_CHOICES = 128


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
    reader = _Reader(tokens or by_bytes)
    found = [reader.requests(line) for line in lines]
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


class _Reader:
    """Reads lengths from lines. `tokens`: counts the tokens of a text."""

    def __init__(self, tokens: TextTokens) -> None:
        self._tokens = tokens

    def requests(self, line: bytes) -> list[Request]:
        """Return a request for each choice of a line; nothing for a line that cannot be read."""
        try:
            body = json.loads(line)["body"]
            is_chat = "messages" in body
            prompt = sum(map(self._of_message, body["messages"])) if is_chat else self._of_prompt(body["prompt"])
            asked = body.get("max_completion_tokens") or body.get("max_tokens")
            output = int(asked or (DEFAULT_OUTPUT if is_chat else _COMPLETION_OUTPUT))
            return [Request(max(prompt, 1), max(output, 1))] * min(max(int(body.get("n") or 1), 1), _MOST_CHOICES)
        except (AttributeError, LookupError, TypeError, ValueError, RecursionError):
            return []

    def _of_message(self, message: Mapping[str, Any]) -> int:
        content = message.get("content") or ""
        parts = [content] if isinstance(content, str) else [str(part.get("text") or "") for part in content]
        return _MESSAGE_TOKENS + sum(map(self._tokens, parts))

    def _of_prompt(self, prompt: Any) -> int:
        """Return the tokens of a text, of a list of token ids, or of a list of either."""
        if isinstance(prompt, str):
            return self._tokens(prompt)
        if not isinstance(prompt, list):
            raise TypeError(f"a prompt is a text or a list, not {type(prompt).__name__}")
        return sum(1 if isinstance(part, int) else self._of_prompt(part) for part in prompt)
