"""Owns measuring this machine's rates: device memory, copies from and to the host, a large product.

Called by the comparing side as `PYTHON device_rates.py SPEC RESULT`. Not yet run on a GPU.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

_HERE = Path(__file__).resolve().parent


def _rate(work: Callable[[], object], finish: Callable[[], object], amount: float, rounds: int) -> dict[str, float]:
    """Return `amount` per second: median, smallest and largest of some rounds, without the first, a warm-up."""
    rates = []
    for _ in range(rounds + 1):
        finish()
        begun = time.perf_counter()
        work()
        finish()
        rates.append(amount / (time.perf_counter() - begun))
    return {"median": statistics.median(rates[1:]), "low": min(rates[1:]), "high": max(rates[1:])}


def measure(spec: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Measure bytes and FLOP per second. `num_bytes`: of a copy; `width`: of square matrices in bfloat16.

    Without a GPU there are no copies between two memories.
    """
    import torch

    device, rounds, num_bytes, width = spec["device"], spec["rounds"], spec["num_bytes"], spec["width"]
    on_gpu = device == "cuda"
    finish: Callable[[], object] = torch.cuda.synchronize if on_gpu else (lambda: None)
    source = torch.ones(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    # A copy reads and writes the same number of bytes.
    rates = {"memory_bytes_per_s": _rate(lambda: target.copy_(source), finish, 2 * num_bytes, rounds)}
    left = torch.randn(width, width, device=device).bfloat16()
    right, product = left.t().contiguous(), torch.empty_like(left)
    rates["flop_per_s"] = _rate(lambda: torch.mm(left, right, out=product), finish, 2 * width**3, rounds)
    if on_gpu:
        host = torch.ones(num_bytes, dtype=torch.uint8, pin_memory=True)
        come = _rate(lambda: target.copy_(host, non_blocking=True), finish, num_bytes, rounds)
        go = _rate(lambda: host.copy_(source, non_blocking=True), finish, num_bytes, rounds)
        rates |= {"copy_in_bytes_per_s": come, "copy_out_bytes_per_s": go}
    return rates


if __name__ == "__main__":
    sys.path[0] = str(_HERE.parent)
    from runners.result_file import answer

    answer(measure)
