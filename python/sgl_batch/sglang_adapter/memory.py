"""Adapts SGLang's memory classes: the bases of our KV pools and allocator, and the size of the pool."""

from __future__ import annotations

from typing import Any

from sgl_batch.sglang_adapter import bootstrap

with bootstrap.importing():
    from sglang.srt.mem_cache.allocator.base import BaseTokenToKVPoolAllocator
    from sglang.srt.mem_cache.memory_pool import KVCache, unwrap_write_loc
    from sglang.srt.model_executor.pool_configurator import create_memory_pool_configurator

__all__ = ["BaseTokenToKVPoolAllocator", "KVCache", "kv_token_bytes", "set_kv_bytes", "unwrap_write_loc"]


def kv_token_bytes(configurator: Any) -> int:
    """Return the bytes of a token's KV in all layers, as SGLang's pool configurator counts them."""
    return int(create_memory_pool_configurator(configurator)._cell_size)


def set_kv_bytes(configurator: Any, num_bytes: int) -> None:
    """Let SGLang's configurator make pools of this size; by itself it takes a share of the machine's free memory."""

    class Budgeted(type(configurator)):  # type: ignore[misc]
        __slots__ = ()

        def _profile_available_bytes(self, pre_model_load_memory: int) -> int:
            return num_bytes

    configurator.__class__ = Budgeted
