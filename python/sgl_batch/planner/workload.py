"""Reads a workload: how long the prompts and the outputs of a batch are."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from sgl_batch.errors import ConfigError

DEFAULT, DEFAULT_OUTPUT = "128:128x256", 128
_COUNT = 256
_SPEC = re.compile(r"(\d+):(\d+)(?:x(\d+))?", re.ASCII)
_MOST_COUNT, _MOST_LISTED = 100_000_000, 1_000_000
_MOST_TOKENS = 1_000_000_000
_TOO_LONG = f"a prompt and an output have at most {_MOST_TOKENS:,} tokens each, give less"
# A number of more digits is above every limit; Python reads no more than 4,300.
_MOST_DIGITS = 18


@dataclass(frozen=True, slots=True)
class Request:
    """A request's prompt and output, in tokens."""

    prompt: int
    output: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A batch in its order. `requests` stand for `count` requests, in equal shares.

    `source`: where it is from, for messages.
    """

    requests: Sequence[Request]
    count: int
    source: str = "given"

    @property
    def tokens(self) -> tuple[int, int]:
        """Return the tokens of all `count` prompts and of all outputs."""
        times = self.count / len(self.requests)
        prompts = sum(request.prompt for request in self.requests)
        return round(times * prompts), round(times * sum(request.output for request in self.requests))

    @property
    def longest(self) -> int:
        """Return the most tokens that a sequence has."""
        return max(request.prompt + request.output for request in self.requests)


def parse_workload(text: str) -> Workload:
    """Read PROMPT:OUTPUTxCOUNT, or several of them behind commas; without a count 256. Raises ConfigError."""
    kinds: list[tuple[Request, int]] = []
    for part in text.split(","):
        found = _SPEC.fullmatch(part.strip())
        prompt, output, count = (_number(number or str(_COUNT)) for number in found.groups()) if found else (0, 0, 0)
        if not (prompt and output and count):
            raise ConfigError(
                f"--workload is {text!r}; it takes PROMPT:OUTPUTxCOUNT, as in 128:32x256 (256 requests of 128 prompt "
                "and 32 output tokens), each at least 1, or several behind commas"
            )
        if max(prompt, output) > _MOST_TOKENS:
            raise ConfigError(f"--workload is {text!r}; {_TOO_LONG}")
        kinds.append((Request(prompt, output), count))
    count = sum(number for _, number in kinds)
    # Each request is followed by itself, where they are few enough.
    alike = 1 if count <= _MOST_LISTED else math.gcd(*(number for _, number in kinds))
    if count > _MOST_COUNT or count // alike > _MOST_LISTED:
        most = _MOST_COUNT if count > _MOST_COUNT else _MOST_LISTED
        why = "" if count > _MOST_COUNT else ", or give counts that are multiples of a larger number"
        raise ConfigError(f"--workload is {text!r}, of {count:,} requests; give at most {most:,}{why}")
    requests = [request for request, number in kinds for _ in range(number // alike)]
    return Workload(requests=requests, count=count)


def parse_lengths(lines: Iterable[str], name: str) -> Workload:
    """Read a line "PROMPT OUTPUT" for each request; # begins a comment. Raises ConfigError with the line's number."""
    requests = []
    for number, line in enumerate(lines, 1):
        words = line.partition("#")[0].replace(",", " ").split()
        if not words:
            continue
        numbers = [_number(word) for word in words if word.isascii() and word.isdigit()]
        if len(words) != 2 or len(numbers) != 2 or not all(numbers):
            raise ConfigError(
                f"line {number} of {name} is {line.strip()!r}; each line takes the tokens of a prompt and of its "
                "output, as in: 128 32"
            )
        if max(numbers) > _MOST_TOKENS:
            raise ConfigError(f"line {number} of {name} is {line.strip()!r}; {_TOO_LONG}")
        requests.append(Request(*numbers))
        if len(requests) > _MOST_LISTED:
            raise ConfigError(f"{name} has more than {_MOST_LISTED:,} requests; give a sample of them")
    if not requests:
        raise ConfigError(f"{name} has no lengths; each line takes the tokens of a prompt and of its output")
    return Workload(requests=requests, count=len(requests))


def _number(digits: str) -> int:
    return int(digits) if len(digits) <= _MOST_DIGITS else 10**_MOST_DIGITS


def followed(workload: Workload, most: int) -> Workload:
    """Return a workload of as many requests as it stands for, but at most `most`, in order.

    They are spaced evenly, in the order if all are needed or more, else by length: so few of them have the same mix.
    """
    requests, length = workload.requests, min(workload.count, most)
    if len(requests) == length:
        return workload
    if len(requests) < length:
        chosen = [index * len(requests) // length for index in range(length)]
    else:
        by_length = sorted(range(len(requests)), key=lambda index: (requests[index].output, requests[index].prompt))
        ranks = [(2 * rank + 1) * len(requests) // (2 * length) for rank in range(length - 1)]
        # The longest is always there: a batch ends with it.
        chosen = sorted(by_length[rank] for rank in (*ranks, len(requests) - 1))
    return replace(workload, requests=[requests[index] for index in chosen])


class Followed:
    """Parts of a workload that are followed request by request, each made once. See `followed`."""

    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        self._made: dict[int, Workload] = {}

    def at_most(self, most: int) -> Workload:
        """Return at most so many requests of the workload."""
        most = min(most, self.workload.count)
        if most not in self._made:
            self._made[most] = followed(self.workload, most)
        return self._made[most]


def within_context(workload: Workload, context: int) -> Workload:
    """Return the workload with sequences of at most `context` tokens, which an engine does not exceed."""
    if workload.longest <= context:
        return workload
    cut = [Request(min(one.prompt, context - 1), one.output) for one in workload.requests]
    return replace(workload, requests=[Request(one.prompt, min(one.output, context - one.prompt)) for one in cut])


def first_group(prompts: Iterable[int], limit: int) -> list[int]:
    """Return the lengths of the first prompts that make a prefill group of at most `limit` tokens; at least one."""
    group: list[int] = []
    tokens = 0
    for prompt in prompts:
        if group and tokens + prompt > limit:
            break
        group.append(prompt)
        tokens += prompt
    return group
