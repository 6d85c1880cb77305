"""Owns the time of the decode steps between two boundaries, from which the coming interval's form of KV is chosen."""

from __future__ import annotations

import time

from sgl_batch.core.kv_state import Interval


class IntervalClock:
    """Rows and seconds since a boundary, which counts itself. A step may begin before the one before it ends."""

    def __init__(self) -> None:
        self._number = self._alive = self._rows = self._under_way = 0
        self._seconds = self._since = 0.0

    def begin(self, alive: int, *, boundary_began: float) -> None:
        """A boundary that began at that time (`time.perf_counter`) is over."""
        self._number += 1
        self._alive, self._rows = alive, 0
        self._seconds = time.perf_counter() - boundary_began

    def begin_step(self, rows: int) -> None:
        self._rows += rows
        if not self._under_way:
            self._since = time.perf_counter()
        self._under_way += 1

    def end_step(self) -> None:
        now = time.perf_counter()
        self._seconds += now - self._since
        self._since = now
        self._under_way -= 1

    @property
    def interval(self) -> Interval:
        """What was measured so far."""
        return Interval(number=self._number, alive=self._alive, rows=self._rows, seconds=self._seconds)
