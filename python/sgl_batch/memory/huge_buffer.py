"""Owns anonymous memory on huge pages for reading files into. It imports no tensors."""

from __future__ import annotations

import ctypes
import mmap

from sgl_batch.memory.page_advice import HUGE_PAGE_BYTES


def huge_buffer(num_bytes: int) -> memoryview:
    """Return `num_bytes` of new memory that begins at a huge page; it lives as long as the view, or views of it, do.

    If the kernel has no huge pages, small ones serve.
    """
    memory = mmap.mmap(-1, num_bytes + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    first = ctypes.c_char.from_buffer(memory)
    begin = -ctypes.addressof(first) % HUGE_PAGE_BYTES
    del first
    return memoryview(memory)[begin : begin + num_bytes]
