"""Owns reading how much memory this process takes."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path

_STATUS = Path("/proc/self/status")
_RESET = Path("/proc/self/clear_refs")


def _status_bytes(*names: str) -> int:
    """Return the sum of these figures of the kernel; 0 if it gives none."""
    with suppress(OSError):
        text = _STATUS.read_text(encoding="ascii")
        found = [re.search(rf"^{name}:\s+(\d+) kB$", text, re.MULTILINE) for name in names]
        return sum(1024 * int(one.group(1)) for one in found if one is not None)
    return 0


def resident_bytes() -> int:
    """Return the bytes that this process has in memory: its own, its libraries' files, and what it shares."""
    return _status_bytes("VmRSS")


def peak_resident_bytes() -> int:
    """Return the most bytes that it had in memory at once, since the start or the last `forget_peak`."""
    return _status_bytes("VmHWM")


def forget_peak() -> None:
    """Reset the peak to what is resident now, if the kernel allows it.

    Called after loading: mapped files count as resident, but the kernel may take them back at any time.
    """
    with suppress(OSError):
        _RESET.write_text("5", encoding="ascii")
