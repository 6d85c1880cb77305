"""Owns the log of an engine's start: when each of its processes ended which phase, on one clock.

Each process appends its lines to a file of its own in the engine's directory, so that a start that fails shows how far
it came.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_PREFIX = "start-log."


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """A phase of a process that has ended: its name, when it began and ended (s), and the bytes it read, or 0."""

    process: str
    name: str
    began_s: float
    ended_s: float
    num_bytes: int


class StartLog:
    """One process's part. Without a directory nothing is logged.

    Its first phase begins with the process itself or, in a program that starts an engine later, with this object.
    """

    def __init__(self, directory: Path | None = None, process: str = "", *, from_process: bool = True) -> None:
        self._file = None if directory is None else directory / f"{_PREFIX}{os.getpid()}"
        self._process, self._last_s = process, 0.0
        if self._file is not None:
            self._last_s = _process_began_s() if from_process else _now_s()

    def end(self, phase: str, *, num_bytes: int = 0) -> None:
        """Log that a phase ends now, which began when the one before it ended. `num_bytes`: what it has read."""
        if self._file is None:
            return
        now_s = _now_s()
        line = json.dumps([self._process, phase, self._last_s, now_s, num_bytes])
        with self._file.open("a", encoding="utf-8") as file:
            file.write(line + "\n")
        self._last_s = now_s


def phases(directory: Path) -> list[Phase]:
    """Return the phases that an engine's processes have logged so far, by the time at which they ended."""
    return sorted(_read(directory), key=lambda phase: phase.ended_s)


def _read(directory: Path) -> Iterator[Phase]:
    for file in directory.glob(f"{_PREFIX}*"):
        for line in file.read_text(encoding="utf-8").splitlines():
            process, name, began_s, ended_s, num_bytes = json.loads(line)
            yield Phase(process=process, name=name, began_s=began_s, ended_s=ended_s, num_bytes=num_bytes)


def table(found: list[Phase]) -> str:
    """Return the phases as text, a line each: seconds since the first began, and how long each took."""
    if not found:
        return "no process has ended a phase"
    zero_s = min(phase.began_s for phase in found)
    names = max(len(phase.process) for phase in found)
    lines = [f"{'ends at':>9}  {'took':>8}  {'process':<{names}}  phase"]
    for phase in found:
        took_s = phase.ended_s - phase.began_s
        rate = f", {phase.num_bytes / 1e9:.2f} GB at {phase.num_bytes / 1e9 / max(took_s, 1e-9):.2f} GB/s"
        lines.append(
            f"{phase.ended_s - zero_s:7.2f} s  {took_s:6.2f} s  {phase.process:<{names}}  {phase.name}"
            f"{rate if phase.num_bytes else ''}"
        )
    return "\n".join(lines)


def _now_s() -> float:
    """Return seconds of a clock that all processes of a machine share, and in which the kernel notes their starts."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()


def _process_began_s() -> float:
    """Return when this process began; now, where the kernel does not say."""
    try:
        # Behind the name, which may hold spaces, the 20th word is the start in ticks since the machine's.
        words = Path("/proc/self/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        return int(words[19]) / os.sysconf("SC_CLK_TCK")
    except OSError:
        return _now_s()
