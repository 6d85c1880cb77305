"""Owns measuring what the cores of one rank do alone and those of all ranks at once: weights read, and products.

Called as `PYTHON shared_rates.py SPEC RESULT`, by `ranks.py long-tail`. Each rank is a process on its own cores.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

_WEIGHT_BYTES, _INPUTS, _ROWS = 4 << 20, 1024, 512
# Of each rank, so many that no cache holds them.
_WEIGHTS = 64
_PHASE_S = 0.5
_REPEATS = 3
# Rows of a product, and what one product counts: bytes of a weight, operations.
_KINDS = {"read": (1, float(_WEIGHT_BYTES)), "products": (_ROWS, float(_ROWS * _WEIGHT_BYTES))}


def measure(spec: dict[str, Any]) -> dict[str, list[float]]:
    """Return for `read` (bytes a second) and `products` (operations a second) the rate alone, and of all together.

    `cores`: the numbers of each rank's.
    """
    import torch  # noqa: F401 - imported once, for all processes that are forked

    context = multiprocessing.get_context("fork")
    ranks = spec["cores"]
    barrier, answers = context.Barrier(len(ranks)), context.SimpleQueue()
    processes = [
        context.Process(target=_rank, args=(number, cores, barrier, answers), daemon=True)
        for number, cores in enumerate(ranks)
    ]
    for process in processes:
        process.start()
    found = [answers.get() for _ in processes]
    for process in processes:
        process.join()
    return {name: _alone_and_together([rates[name] for rates in found]) for name in _KINDS}


def _alone_and_together(ranks: list[dict[str, list[float]]]) -> list[float]:
    """Return the median rate of the rank that was measured alone, and the median of the ranks' sums."""
    alone = next(rates["alone"] for rates in ranks if rates["alone"])
    together = [sum(rates) for rates in zip(*(rates["together"] for rates in ranks), strict=True)]
    return [statistics.median(alone), statistics.median(together)]


def _rank(number: int, cores: list[int], barrier: Any, answers: Any) -> None:
    """Measure one rank, in step with the others: it answers its rates by kind, alone (rank 0) and together."""
    os.sched_setaffinity(0, cores)
    import torch

    torch.set_num_threads(len(cores))
    product = _product()
    found: dict[str, dict[str, list[float]]] = {}
    for name, (rows, amount) in _KINDS.items():
        x = torch.ones(rows, _INPUTS, dtype=torch.bfloat16)
        found[name] = {"alone": [], "together": []}
        _rate(product, x)
        for _ in range(_REPEATS):
            for phase in ("alone", "together"):
                barrier.wait()
                if phase == "together" or number == 0:
                    found[name][phase].append(_rate(product, x) * amount)
    answers.put(found)


def _product() -> Callable[[Any], None]:
    """Return a function that multiplies rows by the next of many weights, as the layers do."""
    import torch

    from sgl_batch.kernel_loader import native_kernels
    from sgl_batch.layers.packed_weights import PackedWeights

    packed = PackedWeights(native_kernels())
    weights = [torch.ones(_WEIGHT_BYTES // 2 // _INPUTS, _INPUTS, dtype=torch.bfloat16) for _ in range(_WEIGHTS)]
    for weight in weights:
        packed.add_linear(weight)
    turns = itertools.cycle(weights)

    def product(x: Any) -> None:
        packed.linear(x, next(turns))

    return product


def _rate(product: Callable[[Any], None], x: Any) -> float:
    """Return how many products a second there are."""
    begun, count = time.perf_counter(), 0
    while (seconds := time.perf_counter() - begun) < _PHASE_S:
        product(x)
        count += 1
    return count / seconds


if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)
    from runners.result_file import answer

    answer(measure)
