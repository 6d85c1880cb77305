"""Owns the doctor's checks of the machine itself: Python, memory, huge pages, shared memory, open files."""

from __future__ import annotations

import os
import platform
import resource
import sys
from collections.abc import Sequence

from sgl_batch.byte_sizes import format_bytes
from sgl_batch.cli.doctor.machine import Machine
from sgl_batch.cli.doctor.rows import Row, State
from sgl_batch.processor import read_processor

_PYTHONS = ((3, 11), (3, 13))  # from the first, below the second; as in pyproject.toml
_LEAST_SHM_BYTES = 64 << 20
_LEAST_FILES = 4096
_LEAST_MEMORY_BYTES = 4 << 30


def python(_: Machine, version: tuple[int, ...] = sys.version_info[:3]) -> Sequence[Row]:
    """Check the interpreter's version: the engine's packages are released for some versions only."""
    low, high = _PYTHONS
    good = low <= version[:2] < high
    return [
        Row(
            check="python",
            state=State.OK if good else State.FAILED,
            found=f"{'.'.join(map(str, version))}, {sys.executable}",
            remedy="" if good else f"use Python {low[0]}.{low[1]} or {high[0]}.{high[1] - 1}",
            required=True,
        )
    ]


def system(machine: Machine) -> Sequence[Row]:
    """Check the operating system, the processor, and how many cores this process may use."""
    cores = len(os.sched_getaffinity(0))
    processor = read_processor(machine.root).name or "unknown processor"
    known = platform.system() == "Linux" and platform.machine() in ("x86_64", "AMD64")
    return [
        Row(
            check="platform",
            state=State.OK if known else State.WARNING,
            found=f"{platform.platform()}, {processor}, {cores} cores",
            remedy="" if known else "sgl_batch is tested only on Linux on x86-64",
            values={"cores": cores},
        )
    ]


def memory(machine: Machine) -> Sequence[Row]:
    """Check how much memory is free, of the machine or within the limit of its control group."""
    from sgl_batch.memory.free_memory import free_bytes

    total = next(
        (
            1024 * int(line.split()[1])
            for line in (machine.text("proc/meminfo") or "").splitlines()
            if line.startswith("MemTotal")
        ),
        0,
    )
    free = free_bytes(machine.root)
    tight = free < _LEAST_MEMORY_BYTES
    return [
        Row(
            check="memory",
            state=State.WARNING if tight else State.OK,
            found=f"{format_bytes(free)} free for this process (within the limit of its control group, if it has one); "
            f"the machine has {format_bytes(total)}",
            remedy="raise the limit of the control group, or end programs that take memory" if tight else "",
            values={"free_bytes": free, "total_bytes": total},
        )
    ]


def huge_pages(machine: Machine) -> Sequence[Row]:
    """Check whether the kernel gives huge pages on request. Weights and the KV store request them."""
    text = machine.text("sys/kernel/mm/transparent_hugepage/enabled")
    mode = None if text is None else text.partition("[")[2].partition("]")[0]
    good = mode in ("always", "madvise")
    return [
        Row(
            check="huge pages",
            state=State.OK if good else State.WARNING,
            found=f"transparent huge pages: {mode or 'not in this kernel'}",
            remedy="" if good else "as root: echo madvise > /sys/kernel/mm/transparent_hugepage/enabled",
        )
    ]


def shared_memory(machine: Machine) -> Sequence[Row]:
    """Check the size of /dev/shm, through which ranks exchange tokens."""
    path = machine.root / "dev/shm"
    if not path.is_dir():
        return [
            Row(
                check="/dev/shm",
                state=State.MISSING,
                found="not present",
                remedy="mount a tmpfs on it for several ranks",
            )
        ]
    found = os.statvfs(path)
    size, free = found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize
    small = free < _LEAST_SHM_BYTES
    return [
        Row(
            check="/dev/shm",
            state=State.WARNING if small else State.OK,
            found=f"{format_bytes(free)} free of {format_bytes(size)}",
            remedy="several ranks need more: mount it larger (docker: --shm-size 1g)" if small else "",
            values={"free_bytes": free, "total_bytes": size},
        )
    ]


def open_files(_: Machine, limits: tuple[int, int] | None = None) -> Sequence[Row]:
    """Check how many files and sockets a process may have open."""
    soft, hard = limits or resource.getrlimit(resource.RLIMIT_NOFILE)
    few = 0 <= soft < _LEAST_FILES
    return [
        Row(
            check="open files",
            state=State.WARNING if few else State.OK,
            found=f"{soft} at most (can be raised to {hard})",
            remedy=f"a server with many connections needs more: ulimit -n {_LEAST_FILES}" if few else "",
            values={"soft": soft, "hard": hard},
        )
    ]
