"""Owns whether memory for KV is taken before requests come, and how much: a share of what is free, on a CPU."""

from __future__ import annotations

from collections.abc import Callable

import torch

from sgl_batch.core.page_ledger import pages_for
from sgl_batch.mem_cache.device_page_pool import DevicePagePool
from sgl_batch.mem_cache.latent_page_pool import LatentPagePool
from sgl_batch.mem_cache.memory_ahead import MemoryAhead, most_bytes_ahead
from sgl_batch.memory.free_memory import free_bytes
from sgl_batch.model_executor.model_runner import BatchModelRunner
from sgl_batch.model_executor.run_context import RunContext

# Of the start. A virtual machine gives a first batch of some hundred sequences its memory in this time; what is left is
# taken while idle.
_SECONDS_OF_START = 1.0


def kv_ahead(runner: BatchModelRunner, context: RunContext, *, free: Callable[[], int] = free_bytes) -> MemoryAhead:
    """Return what takes memory for a rank's KV: some as the engine starts, more while the rank has nothing else to do.

    It takes none for pools that have their memory from the start, as beside a GPU, nor with streamed weights, which
    take what is free.
    """
    pool, page_size = runner.token_to_kv_pool, runner.server_args.page_size
    if not isinstance(pool, DevicePagePool | LatentPagePool) or context.config.memory.weights != "resident":
        return MemoryAhead([], 0)
    most_bytes = most_bytes_ahead(
        free(),
        num_ranks=context.num_ranks,
        page_bytes=page_size * runner.kv_token_bytes,
        most_pages=runner.max_running_requests * pages_for(runner.model_config.context_len, page_size),
        weight_bytes=runner.weight_bytes,
    )
    parts = [part for layer in range(pool.layer_num) for part in pool.page_parts(layer)]
    return MemoryAhead(parts, most_bytes, logs=context.config.trace.log_startup)


def take_at_start(ahead: MemoryAhead) -> None:
    """Take some of it before the engine is ready, with all threads: on a virtual machine two get twice as much."""
    ahead.take_for(_SECONDS_OF_START, torch.get_num_threads())
