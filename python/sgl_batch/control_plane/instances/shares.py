"""Decides how many lines an instance gets, and which ones change their instance at the end. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

MOST_LINES = 512  # of a lot
_FEW_LINES = 64  # every instance may have so many, whatever its share
# No line changes its instance for less: a share of what the slower instance has left. One that is begun is prefilled
# again, and instances that are equally fast differ by a burst of answers: it must gain more, and seconds.
_LEAST_GAIN, _LEAST_GAIN_OF_BEGUN, _LEAST_GAIN_OF_BEGUN_S = 0.1, 0.5, 10.0
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
        movable: Those of `lines` that may go elsewhere although they are begun.
        rate: Lines that it answers a second; 0 where it is not known.
    """

    lines: int
    queued: int
    is_counted: bool
    rate: float
    movable: int = 0

    @property
    def lacks(self) -> bool:
        """Whether it soon has nothing to begin."""
        return self.is_counted and self.queued <= _ENOUGH_QUEUED * self.lines


@dataclass(frozen=True, slots=True, kw_only=True)
class LineMove:
    """So many lines go from one instance to another. `begun`: also lines that `source` has begun."""

    source: int
    target: int
    count: int
    begun: bool = False


def most_lines(depth: int, unanswered: int, rate: float, rates: Sequence[float]) -> int:
    """Return the most lines that an instance has now: its share of all, by its rate.

    What an engine has begun cannot go to another one for nothing. So also the share of an instance that starts waits
    for it.

    Args:
        depth: The most lines that an instance has at a time.
        unanswered: All lines.
        rate: Of this instance, in lines a second; 0 where it is not known.
        rates: Of all instances that take lines now or soon, this one too.
    """
    mean = _mean_rate(rates)
    share = unanswered * (rate or mean) / sum(one or mean for one in rates)
    return min(depth, max(int(share) + 1, _FEW_LINES))


def lot_lines(waiting: int, instances: int, room: int) -> int:
    """Return how many of the waiting lines an instance gets next, which has room for so many more.

    Half of an even share, so that instances of different speed get what they can do: large lots while many lines wait,
    and single lines at the end.
    """
    share = max(1, waiting // (2 * max(instances, 1)))
    return max(0, min(waiting, room, share, MOST_LINES))


def moves(loads: Sequence[Load]) -> LineMove | None:
    """Return which instance gives lines to which one, and how many, so that both end at the same time; or None.

    Asked when no line waits any more. Lines move only to an instance that soon has none to begin: those that it could
    not begin yet would move back and forth with each change of the rates. Lines that are not begun go first. Begun ones
    go where the rates of both are known and far apart. An instance of unknown rate counts as fast as the mean.
    """
    return _move(loads, begun=False) or _move(loads, begun=True)


def _move(loads: Sequence[Load], *, begun: bool) -> LineMove | None:
    known = [one.rate >= _LEAST_RATE for one in loads]
    mean = _mean_rate([one.rate for one in loads])
    rates = [one.rate if is_known else mean for one, is_known in zip(loads, known, strict=True)]
    left_s = [one.lines / rate for one, rate in zip(loads, rates, strict=True)]
    may_give = [one.movable if begun else one.queued for one in loads]
    takers = [number for number, one in enumerate(loads) if one.lacks and (known[number] or not begun)]
    givers = [number for number in range(len(loads)) if may_give[number] and (known[number] or not begun)]
    if not takers or not givers:
        return None
    source, target = max(givers, key=left_s.__getitem__), min(takers, key=left_s.__getitem__)
    gap_s, part = left_s[source] - left_s[target], _LEAST_GAIN_OF_BEGUN if begun else _LEAST_GAIN
    if gap_s <= max(part * left_s[source], _LEAST_GAIN_OF_BEGUN_S if begun else 0.0):
        return None
    count = min(may_give[source], int(gap_s / (1 / rates[source] + 1 / rates[target])))
    return LineMove(source=source, target=target, count=count, begun=begun) if count else None


def _mean_rate(rates: Sequence[float]) -> float:
    """Return the mean of the known rates; 1 if none is known."""
    known = [one for one in rates if one >= _LEAST_RATE]
    return sum(known) / len(known) if known else 1.0
