"""Owns measuring two rates of this machine's cores: a large product, and memory that is written for the first time.

Called by the comparing side as `PYTHON cpu_rates.py SPEC RESULT`.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

_HERE = Path(__file__).resolve().parent


def _new_memory_rate(num_bytes: int, threads: int) -> float:
    """Return the bytes a second at which all cores together write to memory that this process never had."""
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without huge pages refuses the advice
        memory.madvise(mmap.MADV_HUGEPAGE)
    begin, each = ctypes.addressof(ctypes.c_char.from_buffer(memory)), num_bytes // threads
    with ThreadPoolExecutor(threads) as pool:
        begun = time.perf_counter()
        list(pool.map(lambda number: ctypes.memset(begin + number * each, 1, each), range(threads)))
        return threads * each / (time.perf_counter() - begun)


def _product_rate(width: int, times: int) -> float:
    """Return the FLOP a second of the quickest of some square products in bfloat16: a ceiling, not what is usual."""
    import torch

    left, right = (torch.randn(width, width).bfloat16() for _ in range(2))
    quickest = float("inf")
    for _ in range(times):
        begun = time.perf_counter()
        torch.mm(left, right)
        quickest = min(quickest, time.perf_counter() - begun)
    return 2 * width**3 / quickest


def measure(spec: dict[str, Any]) -> dict[str, float]:
    """Measure with `new_bytes` of memory on `threads` threads, and `times` products of matrices `width` wide."""
    return {
        "new_bytes_per_s": _new_memory_rate(spec["new_bytes"], spec["threads"]),
        "flop_per_s": _product_rate(spec["width"], spec["times"]),
    }


if __name__ == "__main__":
    sys.path[0] = str(_HERE.parent)
    from runners.result_file import answer

    answer(measure)
