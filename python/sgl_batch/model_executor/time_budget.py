"""Owns the seconds that all self-checks of a start may take together."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

BUDGET_S = 20.0


class TimeBudget:
    """A number of seconds that is spent piece by piece. `clock`: in seconds, as time.monotonic."""

    def __init__(self, seconds: float = BUDGET_S, clock: Callable[[], float] = time.monotonic) -> None:
        self._left_s, self._clock = seconds, clock

    @contextmanager
    def spending(self, share: float = 1.0) -> Iterator[Callable[[], bool]]:
        """Spend the time inside. Yields a function: whether this share of the remaining seconds is over."""
        begun = self._clock()
        end = begun + share * self._left_s
        try:
            yield lambda: self._clock() >= end
        finally:
            self._left_s = max(0.0, self._left_s - (self._clock() - begun))
