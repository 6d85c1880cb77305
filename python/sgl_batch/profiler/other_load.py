"""Owns measuring how many cores other programs kept busy meanwhile: their work makes a profile slow."""

from __future__ import annotations

import os
import resource
import time

import psutil


class OtherLoad:
    """Counts from when it is made: what this process's cores worked, without this process and its ended children."""

    def __init__(self) -> None:
        self._begun, self._busy_s, self._own_s = time.monotonic(), busy_s(), _own_s()

    def cores(self) -> float:
        """Return the cores that other programs kept busy so far, on average."""
        others_s = busy_s() - self._busy_s - (_own_s() - self._own_s)
        return max(others_s, 0.0) / max(time.monotonic() - self._begun, 1e-3)


def busy_s() -> float:
    """Return the busy seconds, since the machine's start, of the cores that this process may use."""
    usable = os.sched_getaffinity(0)
    found = 0.0
    for number, times in enumerate(psutil.cpu_times(percpu=True)):
        if number in usable:
            found += sum(times) - times.idle - getattr(times, "iowait", 0.0) - getattr(times, "guest", 0.0)
    return found


def _own_s() -> float:
    return sum(
        used.ru_utime + used.ru_stime
        for used in map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    )
