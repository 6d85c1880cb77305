"""Owns measuring rates of this machine: a large product by the best way, a large read, and memory that is new.

Called by the comparing side as `PYTHON cpu_rates.py SPEC RESULT`.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

_HERE = Path(__file__).resolve().parent


def _new_memory(num_bytes: int) -> mmap.mmap:
    """Return memory that was never written, on huge pages if the operating system grants them, as engines' lies."""
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without huge pages refuses the advice
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def _new_memory_rate(num_bytes: int, threads: int) -> float:
    """Return the bytes a second at which all cores together write to memory that this process never had."""
    memory = _new_memory(num_bytes)
    begin, each = ctypes.addressof(ctypes.c_char.from_buffer(memory)), num_bytes // threads
    with ThreadPoolExecutor(threads) as pool:
        begun = time.perf_counter()
        list(pool.map(lambda number: ctypes.memset(begin + number * each, 1, each), range(threads)))
        return threads * each / (time.perf_counter() - begun)


def _product_rates(width: int, times: int) -> dict[str, float]:
    """Return the FLOP a second of a square product of bfloat16 numbers by four ways, the quickest time of each.

    The ways: torch's product of plain matrices, also of ones widened to float32, oneDNN's with a matrix that it has
    packed, and ours. A ceiling, not what is usual. A way that this CPU or environment lacks is left out.
    """
    import torch

    left, right = (torch.randn(width, width).bfloat16() for _ in range(2))
    wide_left, wide_right = left.float(), right.float()
    ways: dict[str, Callable[[], object]] = {
        "torch": lambda: torch.mm(left, right),
        "torch, widened": lambda: torch.mm(wide_left, wide_right),
    }
    with suppress(AttributeError, RuntimeError):
        theirs = torch.ops.mkldnn._reorder_linear_weight(right, width)
        ways["oneDNN, packed"] = lambda: torch.ops.mkldnn._linear_pointwise(left, theirs, None, "none", [], "")
    with suppress(ImportError):
        import sgl_batch_kernel

        ours = right.clone()
        sgl_batch_kernel.pack_(ours[None])
        ways["sgl_batch"] = lambda: sgl_batch_kernel.linear(left, ours)
    return {name: 2 * width**3 / min(_seconds(way) for _ in range(times)) for name, way in ways.items()}


def large_reads(num_bytes: int) -> dict[str, Callable[[], object]]:
    """Return ways of torch to read so many bytes, the same ones each time, on all its threads."""
    import torch

    numbers = torch.frombuffer(_new_memory(num_bytes), dtype=torch.float32).fill_(1.0)
    half = len(numbers) // 2
    return {"torch, sum": numbers.sum, "torch, dot": lambda: torch.dot(numbers[:half], numbers[half:])}


def _read_rates(num_bytes: int, kept_up_s: float) -> tuple[float, float]:
    """Return the bytes a second of large reads by all cores, by the better of two ways, and of a single read at best.

    Steps of decode read for seconds. On a virtual machine a single read may find the memory's other users at rest, and
    then be twice as fast as reads are over a while.
    """
    ways = large_reads(num_bytes)
    times: dict[str, list[float]] = {name: [] for name in ways}
    while any(sum(seconds) < kept_up_s for seconds in times.values()):
        for name, way in ways.items():
            times[name].append(_seconds(way))
    kept_up = max(len(seconds) * num_bytes / sum(seconds) for seconds in times.values())
    return kept_up, num_bytes / min(min(seconds) for seconds in times.values())


def _seconds(way: Callable[[], object]) -> float:
    begun = time.perf_counter()
    way()
    return time.perf_counter() - begun


def measure(spec: dict[str, Any]) -> dict[str, Any]:
    """Measure by `times` products of `width`, reads for `kept_up_s`, and `new_bytes` of memory on `threads` threads."""
    products = _product_rates(spec["width"], spec["times"])
    reads, best_read = _read_rates(spec["read_bytes"], spec["kept_up_s"])
    return {
        "new_bytes_per_s": _new_memory_rate(spec["new_bytes"], spec["threads"]),
        "read_bytes_per_s": reads,
        "best_read_bytes_per_s": best_read,
        "flop_per_s": max(products.values()),
        "flop_per_s_by_way": products,
    }


if __name__ == "__main__":
    sys.path[0] = str(_HERE.parent)
    from runners.result_file import answer

    answer(measure)
