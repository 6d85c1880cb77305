"""Adapts SGLang's KV pools for a GPU: their layers can be redirected to other memory, and their pages copied to a
store.

SGLang allocates one tensor per layer and never moves it. Ours allocate all layers in one tensor, as pages. On a CPU
they serve SGLang's Triton attention under Triton's interpreter, which is how they are tested; not yet run on a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sgl_batch.sglang_adapter import bootstrap

with bootstrap.importing():
    import torch
    from sglang.srt.mem_cache.memory_pool import (
        GPU_MEMORY_TYPE_KV_CACHE,
        MHATokenToKVPool,
        MLATokenToKVPool,
        _set_kv_buffer_impl,
    )

__all__ = ["GpuLatentPool", "GpuPagePool", "use_our_pools"]


def _by_page(rows: torch.Tensor, page_size: int) -> torch.Tensor:
    """View rows by KV index [N, ...] as [pages, page_size, ...], without the rows after the last whole page."""
    whole = len(rows) // page_size * page_size
    pages: torch.Tensor = rows[:whole].unflatten(0, (-1, page_size))
    return pages


def _layers(pool: Any, row: tuple[int, ...]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Allocate the rows of all layers of a pool in one tensor of zeros; return it and each layer's part."""
    tokens = (pool.size // pool.page_size + 1) * pool.page_size
    with pool.memory_saver_adapter.region(GPU_MEMORY_TYPE_KV_CACHE):
        whole = torch.zeros((pool.layer_num * tokens, *row), dtype=pool.store_dtype, device=pool.device)
    return whole, list(whole.split(tokens))


class GpuPagePool(MHATokenToKVPool):  # type: ignore[misc]
    """Keys and values by KV index: per layer [tokens, heads, head_dim]. A KV index is page * page_size + offset."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.first_page = 0
        super().__init__(*args, **kwargs)
        # SGLang's other way to move rows needs a warm-up for each size, and is made for speculative decoding.
        self.use_native_move_kv_cache = True

    def _create_buffers_normal(self) -> None:
        keys, self.k_buffer = _layers(self, (self.head_num, self.head_dim))
        values, self.v_buffer = _layers(self, (self.head_num, self.v_head_dim))
        self.all_parts = (_by_page(keys, self.page_size), _by_page(values, self.page_size))

    def page_parts(self, layer: int) -> tuple[torch.Tensor, ...]:
        """Return the tensors of a layer's pages, each [num_pages, page_size, heads, head_dim]."""
        return _by_page(self.k_buffer[layer], self.page_size), _by_page(self.v_buffer[layer], self.page_size)

    def redirect(self, parts: Sequence[tuple[torch.Tensor, ...]], first_page: int) -> None:
        """Let layers read and write other memory: `parts` of each layer as in page_parts, numbered from
        `first_page`.
        """
        self.k_buffer = [keys.flatten(0, 1) for keys, _ in parts]
        self.v_buffer = [values.flatten(0, 1) for _, values in parts]
        self.first_page = first_page

    def _store_kv_layer(self, layer_idx: int, loc: torch.Tensor, cache_k: torch.Tensor, cache_v: torch.Tensor) -> None:
        """As SGLang's, for memory of any number of tokens."""
        keys, values = self.k_buffer[layer_idx], self.v_buffer[layer_idx]
        _set_kv_buffer_impl(
            cache_k,
            cache_v,
            keys,
            values,
            loc,
            row_dim=self.row_dim,
            store_dtype=self.store_dtype,
            device_module=self.device_module,
            size_limit=len(keys),
            alt_stream=self.alt_stream,
            same_kv_dim=self.same_kv_dim,
        )


class GpuLatentPool(MLATokenToKVPool):  # type: ignore[misc]
    """Latent attention's rows by KV index: per layer [tokens, 1, kv_lora_rank + qk_rope_head_dim]."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.first_page = 0
        super().__init__(*args, **kwargs)

    def _create_buffers(self) -> None:
        rows, self.kv_buffer = _layers(self, (1, self.kv_cache_dim))
        self.all_parts = (_by_page(rows, self.page_size),)

    def page_parts(self, layer: int) -> tuple[torch.Tensor, ...]:
        """Return the tensor of a layer's pages: [num_pages, page_size, 1, row]."""
        return (_by_page(self.kv_buffer[layer], self.page_size),)

    def redirect(self, parts: Sequence[tuple[torch.Tensor, ...]], first_page: int) -> None:
        """As GpuPagePool's."""
        self.kv_buffer = [rows.flatten(0, 1) for (rows,) in parts]
        self.first_page = first_page


def use_our_pools(configurator: Any, allocator_class: Any) -> None:
    """Let SGLang's pool configurator make these pools in place of their base classes, with our allocator."""

    class WithOurPools(type(configurator)):  # type: ignore[misc]
        __slots__ = ()

        def _build_mha_kv_pool(self, *, mha_pool_class: type, quant_method: Any = None, **sizes: Any) -> Any:
            if mha_pool_class is MHATokenToKVPool and quant_method is None:
                mha_pool_class = GpuPagePool
            return super()._build_mha_kv_pool(mha_pool_class=mha_pool_class, quant_method=quant_method, **sizes)

        def _build_mla_kv_pool(self, *, max_total_num_tokens: int) -> Any:
            return GpuLatentPool(
                max_total_num_tokens,
                page_size=self.server_args.page_size,
                dtype=self.kv_cache_dtype,
                kv_lora_rank=self.model_config.kv_lora_rank,
                qk_rope_head_dim=self.model_config.qk_rope_head_dim,
                layer_num=self.layer_info.num_effective_layers,
                device=self.device,
                enable_memory_saver=self.server_args.enable_memory_saver,
                start_layer=self.layer_info.start_layer,
                end_layer=self.layer_info.end_layer,
            )

        # SGLang asks an out-of-tree platform, such as ours on a CPU, for pools of its own.

        def _build_oot_mha_kv_pool(self, *, max_total_num_tokens: int) -> Any:
            return self._build_mha_kv_pool(max_total_num_tokens=max_total_num_tokens, mha_pool_class=MHATokenToKVPool)

        def _build_oot_mla_kv_pool(self, *, max_total_num_tokens: int, is_dsa_model: bool) -> Any:
            return self._build_mla_kv_pool(max_total_num_tokens=max_total_num_tokens)

        def _build_token_to_kv_pool_allocator(self, *, sizes: Any, token_to_kv_pool: Any, **others: Any) -> Any:
            if not isinstance(token_to_kv_pool, (GpuPagePool, GpuLatentPool)):
                return super()._build_token_to_kv_pool_allocator(
                    sizes=sizes, token_to_kv_pool=token_to_kv_pool, **others
                )
            return allocator_class(
                sizes.max_total_num_tokens,
                page_size=self.server_args.page_size,
                dtype=self.kv_cache_dtype,
                device=self.device,
                kvcache=token_to_kv_pool,
                need_sort=False,
            )

    configurator.__class__ = WithOurPools
