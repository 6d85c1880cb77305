"""Owns what lies under a range of addresses: pages of a file that processes share, or this process's own memory."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import torch

from sgl_batch.memory.huge_buffer import huge_buffer
from sgl_batch.memory.page_advice import HUGE_PAGE_BYTES, advise

# Numbers of Linux that the module mmap does not name.
_MAP_FIXED = 0x10
_MADV_POPULATE_READ = 22
_MADV_COLLAPSE = 25

_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)


def reserved(num_bytes: int) -> torch.Tensor:
    """Return untouched memory of whole huge pages, at least `num_bytes`: uint8 [bytes], which begins on a huge page."""
    size = -(-num_bytes // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    return torch.frombuffer(huge_buffer(size), dtype=torch.uint8)


def map_file(memory: torch.Tensor, descriptor: int, *, shared: bool) -> None:
    """Put a file's first bytes under a tensor of whole pages, in place of what lies there.

    `shared`: what is written reaches the file and all who map it. Otherwise a write takes a copy of its page, and what
    others write to the file's other pages may show or not. Raises OSError.
    """
    _map(memory, mmap.MAP_SHARED if shared else mmap.MAP_PRIVATE, descriptor)


def map_own(memory: torch.Tensor) -> None:
    """Put zeros of this process's own under a tensor of whole pages, in place of what lies there. Raises OSError."""
    _map(memory, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1)


def _map(memory: torch.Tensor, flags: int, descriptor: int) -> None:
    access = mmap.PROT_READ | mmap.PROT_WRITE
    found = _libc.mmap(memory.data_ptr(), memory.nbytes, access, flags | _MAP_FIXED, descriptor, 0)
    if found != memory.data_ptr():
        number = ctypes.get_errno()
        raise OSError(number, f"{memory.nbytes >> 20} MiB cannot be mapped: {os.strerror(number)}")
    advise(memory, mmap.MADV_HUGEPAGE)


def written_ranges(descriptor: int) -> Iterator[tuple[int, int]]:
    """Yield where a sparse file has memory: the first byte of each range, and the one after its last."""
    size, last = os.fstat(descriptor).st_size, 0
    while last < size:
        try:
            first = os.lseek(descriptor, last, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:  # nothing but a hole is left
                return
            raise
        last = os.lseek(descriptor, first, os.SEEK_HOLE)
        yield first, last


def fill_with_huge_page(memory: torch.Tensor) -> None:
    """Put a huge page under the addresses of one, over which a file is mapped, where the kernel can (Linux 6.1).

    By default the kernel gives small pages to files in memory, whatever is advised. What is written there is kept. Does
    nothing where an administrator has turned huge pages off altogether.
    """
    with suppress(OSError):
        if "[never]" not in _HUGE_PAGES.read_text(encoding="ascii"):
            memory[:1].clone()  # the kernel replaces small pages, so there must be one
            advise(memory, _MADV_COLLAPSE, page_bytes=HUGE_PAGE_BYTES)


def fault_in(memory: torch.Tensor) -> None:
    """Let a file's pages under a tensor of whole pages count as resident before they are read (Linux 5.14)."""
    advise(memory, _MADV_POPULATE_READ)
