"""Owns the control group of a measured engine: it limits the memory and page cache of its processes."""

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
    """A Linux control group. A process that writes its pid to `procs` joins it with its descendants."""

    directory: Path
    procs: Path
    _peak: Path

    def peak_bytes(self) -> int:
        """Return the peak memory, page cache included."""
        return int(self._peak.read_text(encoding="ascii"))


@contextmanager
def memory_limit(limit_bytes: int) -> Iterator[Confinement]:
    """Make a control group with a memory limit and without swap. Raises ConfigError if this user may not make one."""
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
    """Remove the group after its last process has ended; killed processes take a moment."""
    until = time.monotonic() + _EMPTY_WITHIN_S
    while True:
        try:
            directory.rmdir()
            return
        except OSError:
            if time.monotonic() > until:
                raise
            time.sleep(0.1)
