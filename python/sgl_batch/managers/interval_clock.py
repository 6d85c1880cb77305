"""Owns the rows and time of an interval's decode steps, from which the next interval's form of KV is chosen."""

from __future__ import annotations

import time

from sgl_batch.core.kv_state import Interval


class IntervalClock:
    """Measures rows and seconds since a boundary, including the boundary itself. Steps may overlap."""

    def __init__(self) -> None:
        self._number = self._alive = self._rows = self._under_way = 0
        self._seconds = self._since = 0.0

    def begin(self, alive: int, *, boundary_began: float) -> None:
        """Begin an interval after a boundary that began at `boundary_began` (`time.perf_counter`).

        `alive`: how many sequences run or wait with KV.
        """
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
        """The measurements so far."""
        return Interval(number=self._number, alive=self._alive, rows=self._rows, seconds=self._seconds)
