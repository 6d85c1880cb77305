"""SGLang's memory classes, as our mem_cache and layers rooms build on them."""

from __future__ import annotations

from sgl_batch.sglang_adapter import bootstrap

with bootstrap.importing():
    from sglang.srt.mem_cache.allocator.base import BaseTokenToKVPoolAllocator
    from sglang.srt.mem_cache.memory_pool import KVCache, unwrap_write_loc

__all__ = ["BaseTokenToKVPoolAllocator", "KVCache", "unwrap_write_loc"]
