"""Owns the smallest platform with which stock SGLang starts on a machine without a GPU. It makes nothing faster."""

from __future__ import annotations

from torch.profiler import ProfilerActivity

from sgl_batch.sglang_adapter.platform import CpuSRTPlatform, PlatformEnum


class StockCpuPlatform(CpuSRTPlatform):  # type: ignore[misc]
    """An out-of-tree platform with SGLang's own native operators, pools and allocator.

    Without such a platform, SGLang's rotary embedding needs vLLM's CUDA operators.
    """

    _enum = PlatformEnum.OOT

    def get_default_attention_backend(self) -> str:
        return "torch_native"

    def get_mha_kv_pool_cls(self) -> type:
        from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

        pool: type = MHATokenToKVPool
        return pool

    def get_paged_allocator_cls(self) -> type:
        from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator

        class PageOfOneAllocator(TokenToKVPoolAllocator):  # type: ignore[misc]
            """SGLang's token allocator, with the page_size that SGLang passes to a platform's allocator."""

            def __init__(self, size: int, page_size: int, **kwargs: object) -> None:
                assert page_size == 1, f"stock SGLang on a CPU allocates tokens, got page_size {page_size}"
                super().__init__(size, **kwargs)

        return PageOfOneAllocator

    def get_dispatch_key_name(self) -> str:
        return "native"

    def get_torch_profiler_activity_str(self) -> str:
        """Return the name of this platform's activity in `start_profile`; every out-of-tree platform must have one."""
        return "CPU"

    def get_torch_profiler_activity(self) -> ProfilerActivity:
        return ProfilerActivity.CPU
