"""Owns the arithmetic of the comparison: medians with spread, ratios paired by round, agreement. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """A median with the smallest and largest of `count` values."""

    median: float
    low: float
    high: float
    count: int

    def text(self, digits: int) -> str:
        """Return `median (low-high)`, or the median only if there is one value."""
        if self.count == 1:
            return f"{self.median:.{digits}f}"
        return f"{self.median:.{digits}f} ({self.low:.{digits}f}-{self.high:.{digits}f})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """The agreement of two engines' greedy tokens: equal outputs, and tokens before each first difference."""

    identical: int
    prompts: int
    common_tokens: int
    tokens: int

    def text(self) -> str:
        return f"{self.identical}/{self.prompts} ({100 * self.common_tokens / max(1, self.tokens):.0f} %)"


def spread(values: Iterable[float]) -> Spread | None:
    """Return the spread of the values, or None if there are none."""
    found = list(values)
    if not found:
        return None
    return Spread(median=statistics.median(found), low=min(found), high=max(found), count=len(found))


def paired_ratios(ours: Mapping[int, float], theirs: Mapping[int, float]) -> Spread | None:
    """Return the spread of ours / theirs over the rounds that both have, or None if they share no round."""
    return spread(ours[number] / theirs[number] for number in sorted(ours.keys() & theirs.keys()))


def common_prefix(first: Sequence[int], second: Sequence[int]) -> int:
    """Return how many tokens two outputs share before they first differ."""
    for position, (a, b) in enumerate(zip(first, second, strict=False)):
        if a != b:
            return position
    return min(len(first), len(second))


def agreement(reference: Sequence[Sequence[int]], outputs: Sequence[Sequence[int]]) -> Agreement:
    """Compare two engines' outputs for the same prompts."""
    pairs = list(zip(reference, outputs, strict=True))
    return Agreement(
        identical=sum(list(a) == list(b) for a, b in pairs),
        prompts=len(pairs),
        common_tokens=sum(common_prefix(a, b) for a, b in pairs),
        tokens=sum(len(a) for a, _ in pairs),
    )


def length_fault(outputs: Sequence[Sequence[int]], wanted: Sequence[int]) -> str | None:
    """Return what is wrong with the numbers of output tokens, or None if all are exact."""
    if len(outputs) != len(wanted):
        return f"it answered {len(outputs)} of {len(wanted)} prompts"
    for number, (output, count) in enumerate(zip(outputs, wanted, strict=True), 1):
        if len(output) != count:
            return f"prompt {number} gave {len(output)} output tokens, not {count}"
    return None


def remaining_s(todo: Sequence[str], took: Mapping[str, Sequence[float]]) -> float | None:
    """Estimate the seconds of the engines in `todo` from their times so far; None before the first is done.

    An engine that has not run yet is taken for an average one.
    """
    known = {name: statistics.fmean(times) for name, times in took.items() if times}
    if not known:
        return None
    average = statistics.fmean(known.values())
    return sum(known.get(name, average) for name in todo)
