"""Decides how many lines an instance gets at once, and which ones change their instance at the end. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

MOST_LINES = 512  # of a lot
# No line changes its instance for less: seconds, and a share of what the slower instance has left.
_LEAST_GAIN_S, _LEAST_GAIN = 1.0, 0.1
_LEAST_RATE = 1e-6  # lines a second; less is not known


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What one instance has to do: lines that it has not answered, and how many it answers a second (0: not known)."""

    lines: int
    rate: float


def lot_lines(waiting: int, instances: int, room: int) -> int:
    """Return how many of the waiting lines an instance gets next, which has room for so many more.

    Half of an even share, so that instances of different speed get what they can do: large lots while many lines wait,
    and single lines at the end.
    """
    share = max(1, waiting // (2 * max(instances, 1)))
    return max(0, min(waiting, room, share, MOST_LINES))


def moves(loads: Sequence[Load]) -> tuple[int, int, int] | None:
    """Return which instance gives lines to which one, and how many, so that both end at the same time; or None.

    Asked when no line waits any more. Instances whose rate is not known count as fast as the mean of the others.
    """
    known = [one.rate for one in loads if one.rate >= _LEAST_RATE]
    if len(loads) < 2 or not known:
        return None
    mean = sum(known) / len(known)
    rates = [one.rate if one.rate >= _LEAST_RATE else mean for one in loads]
    left_s = [one.lines / rate for one, rate in zip(loads, rates, strict=True)]
    source = max(range(len(loads)), key=left_s.__getitem__)
    target = min(range(len(loads)), key=left_s.__getitem__)
    gap_s = left_s[source] - left_s[target]
    if gap_s <= max(_LEAST_GAIN_S, _LEAST_GAIN * left_s[source]):
        return None
    count = int(gap_s / (1 / rates[source] + 1 / rates[target]))
    return (source, target, count) if count else None
