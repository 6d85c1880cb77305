"""Owns the bounds of a start: how fast a checkpoint's files can be read, and memory be had for them, by no engine."""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from sgl_batch.weights.disk_rate import disk_rate

_DROP = Path("/proc/sys/vm/drop_caches")
_PIECE_BYTES = 8 << 20
_PAGE_BYTES = 2 << 20
_THREADS = 4


def why_not_droppable() -> str | None:
    """Return why this program cannot empty the page cache, or None if it can."""
    return None if os.access(_DROP, os.W_OK) else f"{_DROP} cannot be written to: run as root to measure cold starts"


def drop_caches() -> None:
    """Empty the page cache of the whole machine."""
    os.sync()
    _DROP.write_text("3", encoding="ascii")


def direct_rate(files: Sequence[Path]) -> float:
    """Return the bytes per second of reading files past the page cache, into memory that is used again."""
    return disk_rate(list(files), threads=_THREADS, most_bytes=total_bytes(files))


def cached_rate(files: Sequence[Path]) -> float:
    """Return the bytes per second of reading files one after the other through the page cache, cold or warm."""
    memory, began = bytearray(_PIECE_BYTES), time.monotonic()
    for path in files:
        with path.open("rb", buffering=0) as file:
            while file.readinto(memory):
                pass
    return total_bytes(files) / (time.monotonic() - began)


def memory_rate(num_bytes: int) -> float:
    """Return the bytes per second at which a thread on each core gets new memory in huge pages from the kernel.

    A virtual machine may have given free memory back to its host: then the host has to find it again, page by page.
    """
    threads = len(os.sched_getaffinity(0))
    with mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        memory.madvise(mmap.MADV_HUGEPAGE)
        pages = range(0, num_bytes, _PAGE_BYTES)

        def touch(first: int) -> None:
            for offset in pages[first::threads]:
                memory[offset] = 1

        began = time.monotonic()
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(touch, range(threads)))
        return num_bytes / (time.monotonic() - began)


def total_bytes(files: Sequence[Path]) -> int:
    return sum(path.stat().st_size for path in files)
