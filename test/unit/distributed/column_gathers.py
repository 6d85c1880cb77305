"""Owns sets of ranks that are threads of this process, with real gathers through memory between them."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import sgl_batch_kernel
import torch

from sgl_batch.distributed.shared_memory_column_gather import SharedMemoryColumnGather
from sgl_batch.layers.column_split import ColumnSplit
from sgl_batch.metrics.counters import Counters

Result = TypeVar("Result")
REGION_BYTES = 1 << 20


def memory_gathers(num_ranks: int, *, timeout_s: float = 20.0) -> list[SharedMemoryColumnGather]:
    """Return the ends of a gather, by rank."""
    regions = [torch.zeros(REGION_BYTES, dtype=torch.uint8) for _ in range(num_ranks)]
    return [SharedMemoryColumnGather(regions, rank, sgl_batch_kernel, timeout_s=timeout_s) for rank in range(num_ranks)]


def splits(num_ranks: int, *, least_bytes: int = 0) -> list[ColumnSplit]:
    """Return the splits of a set of ranks, by rank."""
    return [ColumnSplit(gather, Counters(), least_bytes=least_bytes) for gather in memory_gathers(num_ranks)]


def on_each(ranks: list[Result], work: Callable[[int, Result], torch.Tensor]) -> list[torch.Tensor]:
    """Return `work(rank, end)` of each rank, run at the same time."""
    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(work, range(len(ranks)), ranks))
