"""Decides how many lines an instance gets at once, and which ones change their instance at the end. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

MOST_LINES = 512  # of a lot
_FEW_LINES = 64  # no instance waits for others with fewer
# No line changes its instance for less: a share of what the slower instance has left.
_LEAST_GAIN = 0.1
# An instance with more than this share of its lines not begun lacks none.
_ENOUGH_QUEUED = 1 / 8
_LEAST_RATE = 1e-6  # lines a second; less is not known


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What one instance has to do.

    Attributes:
        lines: That it has not answered.
        queued: Those of them that its engine has not begun, at the last count.
        is_counted: Whether that count has all lines that it was given.
        rate: Lines that it answers a second; 0 where it is not known.
    """

    lines: int
    queued: int
    is_counted: bool
    rate: float

    @property
    def lacks(self) -> bool:
        """Whether it soon has nothing to begin."""
        return self.is_counted and self.queued <= _ENOUGH_QUEUED * self.lines


def most_lines(depth: int, unanswered: int, ready: int, coming: int) -> int:
    """Return the most lines that an instance has now.

    While others start, their share waits for them: what an engine has begun cannot go to another one.

    Args:
        depth: The most lines that an instance has at a time.
        unanswered: All lines.
        ready: Number of instances that take lines, at least 1.
        coming: Number of instances that take lines soon.
    """
    share = -(-unanswered // (ready + coming))
    return min(depth, max(share, _FEW_LINES)) if coming else depth


def lot_lines(waiting: int, instances: int, room: int) -> int:
    """Return how many of the waiting lines an instance gets next, which has room for so many more.

    Half of an even share, so that instances of different speed get what they can do: large lots while many lines wait,
    and single lines at the end.
    """
    share = max(1, waiting // (2 * max(instances, 1)))
    return max(0, min(waiting, room, share, MOST_LINES))


def moves(loads: Sequence[Load]) -> tuple[int, int, int] | None:
    """Return which instance gives lines to which one, and how many, so that both end at the same time; or None.

    Asked when no line waits any more. Only lines that are not begun move, so that nothing is computed twice, and only
    to an instance that soon has no such line: lines that it could not begin yet would move back and forth with each
    change of the rates. Instances whose rate is not known count as fast as the mean of the others.
    """
    known = [one.rate for one in loads if one.rate >= _LEAST_RATE]
    mean = sum(known) / len(known) if known else 1.0
    rates = [one.rate if one.rate >= _LEAST_RATE else mean for one in loads]
    left = [one.lines / rate for one, rate in zip(loads, rates, strict=True)]
    sources = [number for number, one in enumerate(loads) if one.queued]
    targets = [number for number, one in enumerate(loads) if one.lacks]
    if not sources or not targets:
        return None
    source, target = max(sources, key=left.__getitem__), min(targets, key=left.__getitem__)
    gap = left[source] - left[target]
    if gap <= _LEAST_GAIN * left[source]:
        return None
    count = min(loads[source].queued, int(gap / (1 / rates[source] + 1 / rates[target])))
    return (source, target, count) if count else None
