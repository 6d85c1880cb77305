"""Measures how many lines an instance answers a second, over the time in which it has lines."""

from __future__ import annotations

from collections import deque

_WINDOW_S = 60.0
# Engines answer in bursts: many sequences that began together end together.
_LEAST_ANSWERS = 128


class AnswerRate:
    """The answers of the last busy minute, at least the last 128. A time without lines says nothing about the rate."""

    def __init__(self, now: float) -> None:
        self._seen_at = now
        self._busy_s = 0.0
        self._answered = 0
        self._samples: deque[tuple[float, int]] = deque([(0.0, 0)])

    def note(self, now: float, *, answered: int, was_busy: bool) -> None:
        """Count answers that came since the last call."""
        self._busy_s += max(now - self._seen_at, 0.0) if was_busy else 0.0
        self._seen_at = now
        self._answered += answered
        if self._busy_s - self._samples[-1][0] >= 1.0:
            self._samples.append((self._busy_s, self._answered))
        while len(self._samples) > 1 and self._is_past(*self._samples[1]):
            self._samples.popleft()

    def _is_past(self, busy_s: float, answered: int) -> bool:
        return busy_s <= self._busy_s - _WINDOW_S and answered <= self._answered - _LEAST_ANSWERS

    @property
    def lines_per_s(self) -> float:
        """Return the rate; 0 where it is not known yet."""
        busy_s, answered = self._busy_s - self._samples[0][0], self._answered - self._samples[0][1]
        return answered / busy_s if busy_s >= 1.0 else 0.0

    @property
    def is_certain(self) -> bool:
        """Whether the rate is of so many answers that it may be compared with another."""
        return self._answered - self._samples[0][1] >= _LEAST_ANSWERS
