"""Measures how fast the service answers lines, over the time in which lines are in flight."""

from __future__ import annotations

from collections import deque

from sgl_batch.jobs.batch_service.fair_share import Pace

WINDOW_S = 30.0
_SAMPLE_EVERY_S = 1.0


class ServicePace:
    """Counts answered lines over busy seconds: times without a line in flight say nothing about the pace."""

    def __init__(self, now: float) -> None:
        self._seen_at = now
        self._busy_s = 0.0
        self._num_answered = 0
        self._samples: deque[tuple[float, int]] = deque([(0.0, 0)])

    def note_time(self, now: float, *, was_busy: bool) -> None:
        """Account for the time since the last call. Call it before the number in flight changes from or to 0."""
        if was_busy:
            self._busy_s += max(now - self._seen_at, 0.0)
        self._seen_at = now
        if self._busy_s - self._samples[-1][0] >= _SAMPLE_EVERY_S:
            self._samples.append((self._busy_s, self._num_answered))
        while len(self._samples) > 1 and self._samples[1][0] <= self._busy_s - WINDOW_S:
            self._samples.popleft()

    def line_answered(self) -> None:
        """Count a line that the engine has answered."""
        self._num_answered += 1

    def pace(self, num_in_flight: int) -> Pace:
        """Return the pace of the last busy half minute. It is unknown before one busy second and one answer."""
        busy_s, num_answered = self._busy_s - self._samples[0][0], self._num_answered - self._samples[0][1]
        if busy_s < _SAMPLE_EVERY_S or not num_answered:
            return Pace()
        lines_per_s = num_answered / busy_s
        return Pace(lines_per_s=lines_per_s, delay_s=num_in_flight / lines_per_s)
