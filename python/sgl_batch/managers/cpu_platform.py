"""Owns our SGLang platform for machines without a GPU: it names our attention backend, page pools and allocator."""

from __future__ import annotations

from torch.profiler import ProfilerActivity

from sgl_batch.sglang_adapter.names import CPU_ATTENTION, CPU_DISPATCH_KEY
from sgl_batch.sglang_adapter.platform import CpuSRTPlatform, PlatformEnum


class BatchCpuPlatform(CpuSRTPlatform):  # type: ignore[misc]
    """An out-of-tree platform: SGLang asks it for classes, and looks for no compiled CPU kernels.

    SGLang makes its platform while its own modules are half imported. So each method imports its class.
    """

    _enum = PlatformEnum.OOT

    def get_default_attention_backend(self) -> str:
        return CPU_ATTENTION

    def get_mha_kv_pool_cls(self) -> type:
        from sgl_batch.mem_cache.device_page_pool import DevicePagePool

        return DevicePagePool

    def get_mla_kv_pool_cls(self) -> type:
        from sgl_batch.mem_cache.latent_page_pool import LatentPagePool

        return LatentPagePool

    def get_paged_allocator_cls(self) -> type:
        from sgl_batch.mem_cache.page_allocator import PageAllocator

        return PageAllocator

    def get_dispatch_key_name(self) -> str:
        return CPU_DISPATCH_KEY

    def get_torch_profiler_activity_str(self) -> str:
        """Return the name of this platform's activity for SGLang's `start_profile`."""
        return "CPU"

    def get_torch_profiler_activity(self) -> ProfilerActivity:
        return ProfilerActivity.CPU
