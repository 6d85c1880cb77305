"""Owns asking the kernel for huge pages under weights. It decides neither what is a weight nor whether it gets them.

Every call reads weights from end to end. On pages of 4 KiB a core looks up a page for every few rows of them, which
costs expert calls of few tokens up to a fifth of their time.
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
    """Ask for huge pages, as many as fit in a CPU tensor that nobody has written to yet; whether any were asked for.

    What is written already stays where it is. Where the kernel has no huge pages, small ones serve.
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
