"""Owns counting what other programs of this machine do while an engine is timed. Standard library alone."""

from __future__ import annotations

import os
import time
from pathlib import Path

_PROC = Path("/proc")
_NO_WORK = (3, 4, 7, 8, 9)  # of a line of /proc/stat: idle, waiting for a disk, stolen by the host, and guests twice


class OtherPrograms:
    """Counts processor time from its making on: of the machine, less that of this process's session."""

    def __init__(self, proc: Path = _PROC) -> None:
        self._proc = proc
        self._began, self._others_s = time.perf_counter(), self._read()

    def cores(self) -> float | None:
        """Return how many cores other programs have kept busy, on average; None where /proc does not say."""
        others_s, took = self._read(), time.perf_counter() - self._began
        if others_s is None or self._others_s is None:
            return None
        return max(0.0, others_s - self._others_s) / took

    def _read(self) -> float | None:
        """Return the seconds of all processes outside this session so far."""
        try:
            busy = _busy_ticks(self._proc)
        except OSError:
            return None
        return (busy - _session_ticks(self._proc)) / os.sysconf("SC_CLK_TCK")


def _busy_ticks(proc: Path) -> int:
    numbers = [int(word) for word in (proc / "stat").read_text(encoding="ascii").splitlines()[0].split()[1:]]
    return sum(number for place, number in enumerate(numbers) if place not in _NO_WORK)


def _session_ticks(proc: Path) -> int:
    """Return the ticks of the processes of this session, with those that their ended children had."""
    own, total = os.getsid(0), 0
    for directory in proc.iterdir():
        if not directory.name.isdigit():
            continue
        try:
            line = (directory / "stat").read_text(encoding="utf-8", errors="replace")
        except OSError:  # it has ended meanwhile
            continue
        # Behind the name, which may hold spaces: state, parent, group, session, ...
        words = line.rpartition(")")[2].split()
        if int(words[3]) == own:
            total += sum(int(word) for word in words[11:15])
    return total
