"""Owns what is known of output lengths: the mean of those that have finished, of all and of each prompt group."""

from __future__ import annotations

from collections import OrderedDict

# Of the moving mean over all outputs: how many of the last ones count.
_WINDOW = 128
# Prompt groups whose means are kept; those that have finished nothing for longest are dropped.
_MOST_GROUPS = 4096


class _Mean:
    """The mean of all values at first, a moving one over about `_WINDOW` values later."""

    __slots__ = ("count", "value")

    def __init__(self) -> None:
        self.count, self.value = 0, 0.0

    def add(self, value: float) -> None:
        """Take in one more value."""
        self.count = min(self.count + 1, _WINDOW)
        self.value += (value - self.value) / self.count


class LengthForecast:
    """Expected output lengths, in tokens.

    The first outputs to finish are the shortest of those that began together, so that early means are too small.
    Outputs that go on beyond their expected length correct them when they finish.
    """

    def __init__(self) -> None:
        self._all = _Mean()
        self._groups: OrderedDict[str, _Mean] = OrderedDict()

    def finished(self, group: str | None, length: int) -> None:
        """Take in the length of a finished output, and its prompt group if it has one."""
        self._all.add(length)
        if group is None:
            return
        self._groups.setdefault(group, _Mean()).add(length)
        self._groups.move_to_end(group)
        if len(self._groups) > _MOST_GROUPS:
            self._groups.popitem(last=False)

    def expected(self, group: str | None) -> float | None:
        """Return the mean length of a prompt group's outputs, else of all; None if no output has finished."""
        mean = self._groups.get(group, self._all) if group is not None else self._all
        return mean.value if mean.count else None
