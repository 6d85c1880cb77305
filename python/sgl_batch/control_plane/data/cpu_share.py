"""Owns which CPUs of its node an engine gets. Ray counts the CPUs that an actor asks for, and binds it to none.

Engines of one node share its CPUs out by locked files, one for each CPU: the kernel releases a lock when the process
ends, for any reason.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from sgl_batch.distributed.rank_cores import read_cpus
from sgl_batch.errors import ConfigError

_THREADS = "OMP_NUM_THREADS"


@dataclass(slots=True, kw_only=True)
class CpuShare:
    """The CPUs of one engine.

    `cpus`: their numbers; empty where the engine is bound to none. `threads`: how many threads compute.
    """

    cpus: tuple[int, ...]
    threads: int
    _locks: list[int] = field(default_factory=list)

    @classmethod
    def claim(cls, count: int, directory: Path | None = None) -> CpuShare:
        """Claim `count` CPUs that no other engine of this node has, neighbours where possible.

        Where as many are not free, or the node has no more, the engine is bound to none: then the system shares them
        out. `directory`: of the locks; by default one for this user, among the temporary files.
        """
        usable = [cpu.number for cpu in sorted(read_cpus(os.sched_getaffinity(0)))]
        if count >= len(usable):
            return cls(cpus=(), threads=len(usable))
        locks: dict[int, int] = {}
        directory = directory or _shared_directory()
        for number in usable:
            if len(locks) < count and (lock := _lock(directory / f"cpu{number}")) is not None:
                locks[number] = lock
        share = cls(cpus=tuple(sorted(locks)), threads=count, _locks=list(locks.values()))
        if len(locks) < count:
            share.release()
            share.cpus = ()
        return share

    def bind(self) -> None:
        """Bind this thread, and the processes that it starts from now on, and set their number of threads."""
        if self.cpus:
            os.sched_setaffinity(0, self.cpus)
        os.environ[_THREADS] = str(self.threads)

    def release(self) -> None:
        """Let other engines have the CPUs."""
        locks, self._locks = self._locks, []
        for lock in locks:
            os.close(lock)


def share_of_actor(assigned: Mapping[str, float]) -> CpuShare | None:
    """Return the share of an actor by the resources that Ray has assigned to it; None for an engine on a GPU."""
    if assigned.get("GPU"):
        return None
    return CpuShare.claim(max(int(assigned.get("CPU", 0)), 1))


def _shared_directory() -> Path:
    """Return this user's directory of locks. Raises ConfigError where it is another user's."""
    path = Path(tempfile.gettempdir()) / f"sgl-batch-cpus-{os.getuid()}"
    path.mkdir(mode=0o700, exist_ok=True)
    if path.is_symlink() or path.stat().st_uid != os.getuid():
        raise ConfigError(f"{path} belongs to another user, and engines share the CPUs by files in it: remove it")
    return path


def _lock(path: Path) -> int | None:
    """Return the descriptor of a file that is locked now, or None where another process has locked it."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor
