"""Owns the choice of the ranks' all-gather of headers. What is gathered, and why, is in rank_group."""

from __future__ import annotations

from sgl_batch.distributed.rank_context import RankContext
from sgl_batch.distributed.shared_memory import shared_regions
from sgl_batch.distributed.shared_memory_all_gather import ALL_GATHER_BYTES, SharedMemoryAllGather
from sgl_batch.kernel_loader import native_kernels


def join_all_gather(rank_context: RankContext, dispatcher: str, *, timeout_s: float) -> SharedMemoryAllGather | None:
    """Return this rank's end of the all-gather, or None where the ranks share no memory. Every rank calls this.

    Args:
        rank_context: this rank's.
        dispatcher: --token-dispatcher; gloo asks for no shared memory.
        timeout_s: bounds each wait for another rank.
    """
    kernels = native_kernels()
    if kernels is None or dispatcher == "gloo":
        return None
    regions = shared_regions(rank_context.process_group("all-gather", "gloo"), ALL_GATHER_BYTES)
    return SharedMemoryAllGather(regions, rank_context.rank, kernels, timeout_s=timeout_s)
