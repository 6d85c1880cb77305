"""Decides whether an engine hangs: its counters stand still while it has work. The clock is the caller's."""

from __future__ import annotations

from collections.abc import Callable, Mapping


class ProgressWatch:
    """Watches one engine. `limit_s`: how long its counters may stand still while it has work (0: no limit)."""

    def __init__(self, limit_s: float, clock: Callable[[], float]) -> None:
        self._limit_s, self._clock = limit_s, clock
        self._moved_s = clock()
        self._counters: dict[str, float] = {}

    def see(self, counters: Mapping[str, float] | None, *, has_work: bool) -> None:
        """Take the engine's counters now (None: it has not answered), and whether it has work."""
        if not has_work or (counters is not None and dict(counters) != self._counters):
            self._moved_s = self._clock()
        if counters is not None:
            self._counters = dict(counters)

    @property
    def still_s(self) -> float:
        """For how many seconds it has had work and its counters have stood still."""
        return self._clock() - self._moved_s

    @property
    def is_stalled(self) -> bool:
        """Whether the engine counts as hung."""
        return 0 < self._limit_s <= self.still_s
