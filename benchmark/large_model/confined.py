"""Owns the control group that a measured engine is confined to: its processes, their memory and page cache."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from sgl_batch.errors import ConfigError

_V1, _V2 = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")
_NAME = "sgl-batch-benchmark"
_EMPTY_WITHIN_S = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Confinement:
    """A control group of the kernel. Who writes its number to `procs` is in it, with all that it starts."""

    directory: Path
    procs: Path
    _peak: Path

    def peak_bytes(self) -> int:
        """The most that was taken at once, page cache included."""
        return int(self._peak.read_text(encoding="ascii"))


@contextmanager
def memory_limit(limit_bytes: int) -> Iterator[Confinement]:
    """A control group with a limit on memory and none of swap. Raises ConfigError where this user may make none."""
    second = (_V2 / "cgroup.controllers").exists()
    parent = _V2 if second else _V1
    directory = parent / _NAME
    try:
        directory.mkdir(exist_ok=True)
        if second:
            (directory / "memory.max").write_text(str(limit_bytes), encoding="ascii")
            (directory / "memory.swap.max").write_text("0", encoding="ascii")
        else:
            (directory / "memory.limit_in_bytes").write_text(str(limit_bytes), encoding="ascii")
    except OSError as error:
        raise ConfigError(
            f"no control group with a limit on memory can be made in {parent} ({error.strerror}): run as root, on a "
            "machine whose memory controller is on"
        ) from error
    peak = directory / ("memory.peak" if second else "memory.max_usage_in_bytes")
    try:
        yield Confinement(directory=directory, procs=directory / "cgroup.procs", _peak=peak)
    finally:
        _remove(directory)


def _remove(directory: Path) -> None:
    """The group goes when its last process has; those that were killed take a moment."""
    until = time.monotonic() + _EMPTY_WITHIN_S
    while True:
        try:
            directory.rmdir()
            return
        except OSError:
            if time.monotonic() > until:
                raise
            time.sleep(0.1)
