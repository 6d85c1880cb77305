"""Owns asking the kernel for huge pages under weights. It decides neither what is a weight nor whether it gets them.

Every call reads weights from end to end. On pages of 4 KiB a core looks up a page for every few rows of them, which
costs expert calls of few tokens up to a fifth of their time.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.modules.module import register_module_parameter_registration_hook

_HUGE_PAGE_BYTES = 1 << 21
_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def prefer_huge_pages(tensor: torch.Tensor) -> bool:
    """Ask for huge pages, as many as fit in a CPU tensor that nobody has written to yet; whether any were asked for.

    What is written already stays where it is. Where the kernel has no huge pages, small ones serve.
    """
    if tensor.device.type != "cpu":
        return False
    begin, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
    first, last = -(-begin // _HUGE_PAGE_BYTES) * _HUGE_PAGE_BYTES, end // _HUGE_PAGE_BYTES * _HUGE_PAGE_BYTES
    return tensor.is_contiguous() and first < last and _libc.madvise(first, last - first, mmap.MADV_HUGEPAGE) == 0


@contextmanager
def huge_parameters() -> Iterator[None]:
    """Inside, modules get parameters on huge pages, as they are created and before they are loaded."""

    def ask(_module: Any, _name: str, parameter: torch.nn.Parameter | None) -> None:
        if parameter is not None:
            prefer_huge_pages(parameter.data)

    handle = register_module_parameter_registration_hook(ask)
    try:
        yield
    finally:
        handle.remove()
