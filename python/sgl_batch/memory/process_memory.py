"""Owns reading how much memory this process takes; decides nothing about how much it may."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path

_STATUS = Path("/proc/self/status")
_RESET = Path("/proc/self/clear_refs")


def _status_bytes(*names: str) -> int:
    """The sum of these figures of the kernel's; 0 where it gives none."""
    with suppress(OSError):
        text = _STATUS.read_text(encoding="ascii")
        found = [re.search(rf"^{name}:\s+(\d+) kB$", text, re.MULTILINE) for name in names]
        return sum(1024 * int(one.group(1)) for one in found if one is not None)
    return 0


def resident_bytes() -> int:
    """What this process has in memory now: its own, its libraries' files, and what it shares with others."""
    return _status_bytes("VmRSS")


def peak_resident_bytes() -> int:
    """The most that it had in memory at once, since the start or the last `forget_peak`."""
    return _status_bytes("VmHWM")


def forget_peak() -> None:
    """Let the peak begin again with what is resident now; where the kernel does not allow it, it stays.

    For the end of loading: the files that it maps count as resident, but the kernel may take them back at any time.
    """
    with suppress(OSError):
        _RESET.write_text("5", encoding="ascii")
