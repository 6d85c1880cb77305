"""Owns the device tier's KV pages of latent attention (MLA) on a CPU. The page allocator gives the pages out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from sgl_batch.errors import ConfigError
from sgl_batch.kernel_loader import native_kernels
from sgl_batch.mem_cache.device_page_pool import lazy_layers
from sgl_batch.sglang_adapter.memory import KVCache, unwrap_write_loc


class LatentPagePool(KVCache):  # type: ignore[misc]
    """One row per token and layer, shared by all heads: its latent [kv_lora_rank], then its rotated key part.

    Per layer [num_pages, page_size, kv_lora_rank + qk_rope_head_dim], token after token. Keys are whole rows, values
    are their latents, so nothing is stored twice. KV indices, page 0 and lazy memory are as in DevicePagePool.
    """

    def __init__(
        self,
        size: int,
        page_size: int,
        dtype: torch.dtype,
        kv_lora_rank: int,
        qk_rope_head_dim: int,
        layer_num: int,
        device: str,
        enable_memory_saver: bool,
        start_layer: int | None = None,
        end_layer: int | None = None,
        index_head_dim: int | None = None,
    ) -> None:
        if index_head_dim is not None:
            raise ConfigError(
                "this model selects the tokens of attention with an indexer, which the CPU does not support"
            )
        super().__init__(size, page_size, dtype, layer_num, device, enable_memory_saver, start_layer, end_layer)
        self.kv_lora_rank, self.qk_rope_head_dim = kv_lora_rank, qk_rope_head_dim
        self.row_dim = kv_lora_rank + qk_rope_head_dim
        shape = (size // page_size + 1, page_size, self.row_dim)
        all_pages, self.pages = lazy_layers(layer_num, shape, dtype)
        self.all_parts: tuple[torch.Tensor, ...] = (all_pages,)
        """As in DevicePagePool."""
        self.first_page = 0
        # The native kernels read bf16 in pairs.
        self.native_layout = dtype == torch.float32 or (
            dtype == torch.bfloat16 and kv_lora_rank % 2 == 0 and qk_rope_head_dim % 2 == 0
        )
        self._finalize_allocation_log(size)

    def page_parts(self, layer: int) -> tuple[torch.Tensor, ...]:
        """Return the parts of a layer's pages, each [num_pages, ...]. Layers are counted from this process's first."""
        return (self.pages[layer],)

    def redirect(self, parts: Sequence[tuple[torch.Tensor, ...]], first_page: int) -> None:
        """Point the layers to other memory: `parts` of each as in page_parts; `first_page` numbers the first page."""
        self.pages = [rows for (rows,) in parts]
        self.first_page = first_page

    def get_pages(self, layer_id: int) -> torch.Tensor:
        """Return a layer's pages [num_pages, page_size, row]."""
        return self.pages[int(layer_id - self.start_layer)]

    def pages_by_head(self, layer_id: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a layer's keys [num_pages, 1, page_size, row] and values [num_pages, 1, page_size, kv_lora_rank]."""
        keys = self.get_pages(layer_id)[:, None]
        return keys, keys[..., : self.kv_lora_rank]

    def get_key_buffer(self, layer_id: int) -> torch.Tensor:
        """Return a layer's rows by KV index [num_indices, 1, row], as SGLang does."""
        return self.get_pages(layer_id).flatten(0, 1)[:, None]

    def get_value_buffer(self, layer_id: int) -> torch.Tensor:
        return self.get_key_buffer(layer_id)[..., : self.kv_lora_rank]

    def get_kv_buffer(self, layer_id: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.get_key_buffer(layer_id), self.get_value_buffer(layer_id)

    def get_kv_size_bytes(self) -> int:
        return sum(t.nbytes for t in self.pages)

    def set_kv_buffer(self, layer: Any, loc: Any, cache_k: torch.Tensor, cache_v: torch.Tensor | None) -> None:
        """Write the rows `cache_k` [tokens, 1, row] of one layer at KV indices `loc` [tokens]; they hold the values.

        KV indices are counted as in DevicePagePool.
        """
        kv_indices, _, _ = unwrap_write_loc(loc)
        self.write_kv(layer.layer_id, kv_indices, cache_k, cache_v)

    def write_kv(
        self, layer_id: int, kv_indices: torch.Tensor, keys: torch.Tensor, values: torch.Tensor | None
    ) -> None:
        """Write rows `keys` [tokens, 1, row] at `kv_indices` [tokens]; values are part of them."""
        table, rows, kernels = self.get_pages(layer_id).flatten(0, 1), keys.to(self.dtype).flatten(1), native_kernels()
        if kernels is None:
            table[kv_indices] = rows
        else:
            kernels.write_rows(table, kv_indices, rows)

    def read_kv(self, layer_id: int, kv_indices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a copy of keys [tokens, 1, row] and values [tokens, 1, kv_lora_rank] at `kv_indices` [tokens]."""
        rows = self.get_key_buffer(layer_id)[kv_indices]
        return rows, rows[..., : self.kv_lora_rank]

    def move_kv_cache(self, tgt_loc: torch.Tensor, src_loc: torch.Tensor) -> None:
        """Copy the tokens at `src_loc` to `tgt_loc` in every layer; source and target must not overlap."""
        for pages in self.pages:
            rows = pages.flatten(0, 1)
            rows[tgt_loc] = rows[src_loc]
