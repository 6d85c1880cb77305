"""Measures how much an instance does a second, over the time in which it has lines."""

from __future__ import annotations

from collections import deque

_WINDOW_S = 20.0


class BusyRate:
    """What is done in the last busy seconds: answers, or tokens. A time without lines says nothing about the rate."""

    def __init__(self, now: float) -> None:
        self._seen_at = now
        self._busy_s = 0.0
        self._done = 0.0
        self._samples: deque[tuple[float, float]] = deque([(0.0, 0.0)])

    def note(self, now: float, *, done: float, was_busy: bool) -> None:
        """Count what was done since the last call."""
        self._busy_s += max(now - self._seen_at, 0.0) if was_busy else 0.0
        self._seen_at = now
        self._done += done
        if self._busy_s - self._samples[-1][0] >= 1.0:
            self._samples.append((self._busy_s, self._done))
        while len(self._samples) > 1 and self._samples[1][0] <= self._busy_s - _WINDOW_S:
            self._samples.popleft()

    @property
    def per_s(self) -> float:
        """Return the rate; 0 where it is not known yet."""
        busy_s, done = self._busy_s - self._samples[0][0], self._done - self._samples[0][1]
        return done / busy_s if busy_s >= 1.0 else 0.0
