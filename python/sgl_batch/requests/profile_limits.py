"""Decides which profiles of the engine are allowed, and when a profile ends. It starts and stops none.

A profiler keeps every event in memory until it stops, and takes several times as much memory to write them to a file.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from sgl_batch.byte_sizes import format_bytes
from sgl_batch.errors import RequestError
from sgl_batch.memory.process_memory import resident_bytes

DEFAULT_STEPS = 20
MOST_STEPS = 100
MOST_S = 60.0
MOST_BYTES = 1 << 28
_ON_GPU = ("MEM", "CUDA_PROFILER", "RPD")


def steps_of(num_steps: int | None) -> int:
    """Return how many steps a profile takes at most; the default where None is given. Raises RequestError."""
    if num_steps is None:
        return DEFAULT_STEPS
    if not 1 <= num_steps <= MOST_STEPS:
        _refuse("num_steps", f"num_steps is {num_steps}; give 1 to {MOST_STEPS}, the limit (default: {DEFAULT_STEPS})")
    return num_steps


def check_activities(activities: Sequence[str] | None, *, on_cpu: bool) -> None:
    """Refuse an activity that no profiler here records without ending the engine. Raises RequestError."""
    known = ("CPU", "GPU") if on_cpu else ("CPU", "GPU", *_ON_GPU)
    unknown = [one for one in activities or () if one not in known]
    if unknown or activities == []:
        what = repr(unknown[0]) if unknown else "empty"
        _refuse("activities", f"activities has {what}; there are {', '.join(known)} on this device")


def check_directory(output_dir: str | None) -> Path:
    """Return the directory for traces; make it where it is missing. Raises RequestError if it cannot be written."""
    path = Path(output_dir or os.environ.get("SGLANG_TORCH_PROFILER_DIR", "/tmp")).expanduser()
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        _refuse("output_dir", f"output_dir {path} cannot be made: {error}; name another")
    if not os.access(path, os.W_OK | os.X_OK):
        _refuse("output_dir", f"output_dir {path} cannot be written; name another")
    return path


def limits_text(num_steps: int) -> str:
    """Return the text, for a person, that says when a profile ends by itself."""
    return f"{num_steps} steps, {MOST_S:.0f} s or {format_bytes(MOST_BYTES)} of memory"


class ProfileWatch:
    """Measures the time and the memory of the profile that is under way in this process."""

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, resident: Callable[[], int] = resident_bytes
    ) -> None:
        self._clock, self._resident = clock, resident
        self._began_s: float | None = None
        self._began_bytes = 0

    def must_end(self, is_under_way: bool) -> str | None:
        """Return why the profile has to end now; None while it may go on, and where none `is_under_way`."""
        if not is_under_way:
            self._began_s = None
            return None
        if self._began_s is None:
            self._began_s, self._began_bytes = self._clock(), self._resident()
        if self._clock() - self._began_s >= MOST_S:
            return f"it has taken {MOST_S:.0f} s"
        if self._resident() - self._began_bytes >= MOST_BYTES:
            return f"the process has grown by {format_bytes(MOST_BYTES)}"
        return None


def _refuse(param: str, message: str) -> NoReturn:
    raise RequestError(code="invalid_profile", message=message, param=param)
