"""Owns counting processor time while an engine is timed: its own, and other programs'. Standard library alone."""

from __future__ import annotations

import os
import time
from pathlib import Path

_PROC = Path("/proc")
_NO_WORK = (3, 4, 7, 8, 9)  # of a line of /proc/stat: idle, waiting for a disk, stolen by the host, and guests twice


class OtherPrograms:
    """Counts processor time from its making on: of this process's session, and of the machine less that."""

    def __init__(self, proc: Path = _PROC) -> None:
        self._proc = proc
        self._began, self._then_s = time.perf_counter(), self._read()

    def cores(self) -> float | None:
        """Return how many cores other programs have kept busy, on average; None where /proc does not say."""
        now_s, took = self._read(), time.perf_counter() - self._began
        if now_s is None or self._then_s is None:
            return None
        return max(0.0, now_s[0] - self._then_s[0]) / took

    def own_s(self) -> float | None:
        """Return the seconds, of user and system, that this session has taken; None where /proc does not say."""
        now_s = self._read()
        return None if now_s is None or self._then_s is None else now_s[1] - self._then_s[1]

    def _read(self) -> tuple[float, float] | None:
        """Return the seconds so far of all processes outside this session, and of those in it."""
        try:
            busy = _busy_ticks(self._proc)
        except OSError:
            return None
        own, a_second = _session_ticks(self._proc), os.sysconf("SC_CLK_TCK")
        return (busy - own) / a_second, own / a_second


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
