"""The smallest shim with which stock SGLang starts on a machine without a GPU. It speeds nothing up."""

from __future__ import annotations

from torch.profiler import ProfilerActivity

from sgl_batch.sglang_adapter.platform import CpuSRTPlatform, PlatformEnum


class StockCpuPlatform(CpuSRTPlatform):  # type: ignore[misc]
    """An out-of-tree platform of SGLang's own native operators, pools and allocator.

    Without one, SGLang's rotary embedding asks for vLLM's CUDA operators.
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
            """SGLang's token allocator, with the page_size that a platform's allocator is given."""

            def __init__(self, size: int, page_size: int, **kwargs: object) -> None:
                assert page_size == 1, f"stock SGLang on a CPU allocates tokens, got page_size {page_size}"
                super().__init__(size, **kwargs)

        return PageOfOneAllocator

    def get_dispatch_key_name(self) -> str:
        return "native"

    def get_torch_profiler_activity_str(self) -> str:
        """What `start_profile` calls this platform's own activity; SGLang asks every out-of-tree platform."""
        return "CPU"

    def get_torch_profiler_activity(self) -> ProfilerActivity:
        return ProfilerActivity.CPU
