"""Owns advice to the kernel on the memory pages under a tensor."""

from __future__ import annotations

import ctypes
import mmap
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

HUGE_PAGE_BYTES = 2 << 20
# Linux's MADV_POPULATE_WRITE, of Linux 5.14. It gives memory as a write would, and leaves what is there as it is.
POPULATE_WRITE = 23

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def advise(tensor: torch.Tensor, advice: int, *, page_bytes: int = mmap.PAGESIZE) -> bool:
    """Give `advice` (one of mmap.MADV_*) on the whole pages within a contiguous CPU tensor.

    Returns whether the kernel has taken it. False if the tensor has no whole page.
    """
    begin, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
    first, last = -(-begin // page_bytes) * page_bytes, end // page_bytes * page_bytes
    return first < last and bool(_libc.madvise(first, last - first, advice) == 0)


def populate(memory: torch.Tensor) -> bool:
    """Take memory for a contiguous CPU tensor from the kernel. It takes 2 ms for each MiB, or less.

    Returns whether the kernel has given it. What the tensor holds stays.
    """
    return advise(memory, POPULATE_WRITE)
