"""Owns asking the kernel for huge pages under weights.

Every call reads weights from end to end. With pages of 4 KiB, a core looks up a page for every few rows, which costs
expert calls of few tokens up to a fifth of their time.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.modules.module import register_module_parameter_registration_hook

from sgl_batch.memory.page_advice import HUGE_PAGE_BYTES, advise


def prefer_huge_pages(tensor: torch.Tensor) -> bool:
    """Ask for huge pages under a CPU tensor that is not yet written to. Returns whether any fit in it.

    Written pages stay as they are. If the kernel has no huge pages, small ones serve.
    """
    plain = tensor.device.type == "cpu" and tensor.is_contiguous()
    return plain and advise(tensor, mmap.MADV_HUGEPAGE, page_bytes=HUGE_PAGE_BYTES)


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
