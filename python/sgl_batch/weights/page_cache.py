"""Owns the choice of the files of weights that are read past the page cache, at the rate of a fast disk.

Through the page cache a file's bytes take new memory twice, for the cache and for the weights, and a copy more. So a
fast disk is waited for less than the cache is filled. A slow one is read through the cache: ahead, while processes
import, and once for all starts of an engine.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import time
from collections.abc import Sequence
from pathlib import Path

from sgl_batch.memory.huge_buffer import huge_buffer

logger = logging.getLogger(__name__)

# Bytes per second. At less, a start that loads 6 GB waits seconds longer than one with the files in the page cache.
_FAST_DISK = 1.5e9
# Fewer bytes are loaded in less time than finding out takes.
_LEAST_BYTES = 256 << 20
# Read by one call, because a thread that Python makes wait between calls would seem a slow disk.
_PROBED_BYTES = 128 << 20
_PROBE_BUFFER_BYTES = 2 << 20
# By the number of a disk: read once for this process and those that are forked from it.
_rates: dict[int, float] = {}

_libc = ctypes.CDLL(None, use_errno=True)


def files_to_read_past_it(files: Sequence[Path]) -> list[Path]:
    """Return those of `files` that are to be read past the page cache, in their order.

    These are all that are not in it for the most part, if the disk is fast: a part of the largest is read to find out.
    """
    try:
        absent = [file for file in files if cached_share(file) < 0.5]
        if sum(file.stat().st_size for file in absent) < _LEAST_BYTES:
            return []
        return absent if direct_rate(absent) >= _FAST_DISK else []
    except (OSError, ValueError, AttributeError) as error:  # a file system or a system without direct reads
        logger.debug("weights are read through the page cache: %s", error)
        return []


def cached_share(file: Path) -> float:
    """Return the share of a file's pages that are in the page cache; 1 for an empty file.

    The kernel tells only those who own a file or may write to it. For others all of it counts as cached.
    """
    with file.open("rb") as opened:
        size = os.fstat(opened.fileno()).st_size
        if size == 0:
            return 1.0
        with mmap.mmap(opened.fileno(), size, access=mmap.ACCESS_COPY) as mapped:
            pages = -(-size // mmap.PAGESIZE)
            found = (ctypes.c_ubyte * pages)()
            first = ctypes.c_char.from_buffer(mapped)
            failed = _libc.mincore(ctypes.c_void_p(ctypes.addressof(first)), ctypes.c_size_t(size), found)
            del first
    if failed:
        raise OSError(ctypes.get_errno(), f"mincore: {os.strerror(ctypes.get_errno())}")
    return 1 - bytes(found).count(0) / pages


def direct_rate(files: Sequence[Path]) -> float:
    """Return the bytes per second at which the disk of the largest file is read past the page cache.

    These are the file's first 128 MiB. A disk is asked once.
    """
    file = max(files, key=lambda one: one.stat().st_size)
    disk = file.stat().st_dev
    if disk not in _rates:
        _rates[disk] = _rate_of(file)
    return _rates[disk]


def _rate_of(file: Path) -> float:
    buffer = huge_buffer(_PROBE_BUFFER_BYTES)
    whole = min(_PROBED_BYTES, file.stat().st_size) // _PROBE_BUFFER_BYTES
    descriptor = os.open(file, os.O_RDONLY | os.O_DIRECT)
    try:
        begun = time.perf_counter()
        return os.preadv(descriptor, [buffer] * whole, 0) / (time.perf_counter() - begun)
    finally:
        os.close(descriptor)
