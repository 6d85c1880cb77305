"""Owns the seconds that all self-checks of a start may take together. What they measure is decided elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

BUDGET_S = 20.0


class TimeBudget:
    """Seconds that are spent piece by piece. `clock`: in seconds, as time.monotonic."""

    def __init__(self, seconds: float = BUDGET_S, clock: Callable[[], float] = time.monotonic) -> None:
        self._left_s, self._clock = seconds, clock

    @contextmanager
    def spending(self, share: float = 1.0) -> Iterator[Callable[[], bool]]:
        """What passes inside is spent; yields whether this share of what was left is over."""
        begun = self._clock()
        end = begun + share * self._left_s
        try:
            yield lambda: self._clock() >= end
        finally:
            self._left_s = max(0.0, self._left_s - (self._clock() - begun))
