"""Owns whether the process that was a rank still runs on this machine. It decides nothing about its blocks."""

from __future__ import annotations

from pathlib import Path

_PROCESSES = Path("/proc")
# Fields of /proc/PID/stat, counted after the program's name.
_STATE, _START = 0, 19
_ENDED = ("Z", "X")


def _stat(path: Path) -> list[str] | None:
    """Return the fields after the program's name, which may hold any characters; None if there is no such process."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None


def process_start(pid: int) -> int:
    """Return when the process began, in clock ticks. It distinguishes processes that had the same number."""
    fields = _stat(_PROCESSES / str(pid) / "stat")
    if fields is None:
        raise ProcessLookupError(f"there is no process {pid}")
    return int(fields[_START])


def is_running(pid: int, start: int) -> bool:
    """Whether any thread of that process may still write to memory or to a file."""
    fields = _stat(_PROCESSES / str(pid) / "stat")
    if fields is None or int(fields[_START]) != start:
        return False
    if fields[_STATE] not in _ENDED:
        return True
    # The main thread of a killed process may have ended while another is still in a system call.
    try:
        threads = [_stat(thread / "stat") for thread in (_PROCESSES / str(pid) / "task").iterdir()]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return any(thread is not None and thread[_STATE] not in _ENDED for thread in threads)
