"""Estimates how long the requests of an input file are, from a sample of its lines, for the plan of a run.

It reads at most some hundred lines, and loads no tokenizer: four bytes of text count as a token. Outputs count with
their limit, max_tokens. Lines that cannot be read count as lines; the run refuses them later.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from sgl_batch.planner.workload import DEFAULT_OUTPUT, Request, Workload

_BYTES_A_TOKEN = 4
_MESSAGE_TOKENS = 4  # of a chat template, for each message
# Where a line has no limit: that of /v1/completions, and for a chat, which has none, the planner's usual output.
_COMPLETION_OUTPUT = 16
_WHOLE_BYTES = 1 << 20
_PLACES, _LINES_AT_ONCE = 64, 4
_LONGEST_LINE = 1 << 20
_MOST_CHOICES = 128


def sample_workload(path: Path, limit: int | None) -> Workload | None:
    """Return the batch of an input file, or None where no sampled line is a request.

    `limit`: the most lines that are run.
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
    found = [_requests(line) for line in lines]
    requests = [one for some in found for one in some]
    if not requests:
        return None
    each = len(requests) / sum(1 for some in found if some)
    count = round(each * min(num_lines, limit or num_lines))
    return Workload(requests=requests, count=max(count, 1), source=f"estimated from {len(lines):,} lines of the input")


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


def _requests(line: bytes) -> list[Request]:
    """Return a request for each choice of a line; nothing for a line that cannot be read."""
    try:
        body = json.loads(line)["body"]
        is_chat = "messages" in body
        prompt = sum(map(_message_tokens, body["messages"])) if is_chat else _prompt_tokens(body["prompt"])
        asked = body.get("max_completion_tokens") or body.get("max_tokens")
        output = int(asked or (DEFAULT_OUTPUT if is_chat else _COMPLETION_OUTPUT))
        return [Request(max(prompt, 1), max(output, 1))] * min(max(int(body.get("n") or 1), 1), _MOST_CHOICES)
    except (AttributeError, LookupError, TypeError, ValueError, RecursionError):
        return []


def _message_tokens(message: Mapping[str, Any]) -> int:
    content = message.get("content") or ""
    parts = [content] if isinstance(content, str) else [str(part.get("text") or "") for part in content]
    return _MESSAGE_TOKENS + sum(map(_text_tokens, parts))


def _prompt_tokens(prompt: Any) -> int:
    """Return the tokens of a text, of a list of token ids, or of a list of either."""
    if isinstance(prompt, str):
        return _text_tokens(prompt)
    if not isinstance(prompt, list):
        raise TypeError(f"a prompt is a text or a list, not {type(prompt).__name__}")
    return sum(1 if isinstance(part, int) else _prompt_tokens(part) for part in prompt)


def _text_tokens(text: str) -> int:
    return -(-len(text.encode("utf-8", "replace")) // _BYTES_A_TOKEN)
