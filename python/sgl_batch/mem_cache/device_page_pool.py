"""Owns the device tier's KV pages of multi-head attention on a CPU. The page allocator gives the pages out."""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch

from sgl_batch.kernel_loader import native_kernels
from sgl_batch.mem_cache.page_layout import PanelLayout, page_layout
from sgl_batch.sglang_adapter.memory import KVCache, unwrap_write_loc


def lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return zeros whose memory the kernel gives on first write; torch.zeros would touch a pool of gigabytes at start.

    They lie on huge pages if the kernel grants them: attention reads pages of KV in any order, and misses fewer address
    translations.
    """
    memory = mmap.mmap(-1, math.prod(shape) * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without huge pages refuses the advice
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(shape)


def lazy_layers(num_layers: int, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return lazy zeros [num_layers * N, ...] for layers of `shape` [N, ...], and each layer's share of them."""
    whole = lazy_zeros((num_layers * shape[0], *shape[1:]), dtype)
    return whole, list(whole.split(shape[0]))


class DevicePagePool(KVCache):  # type: ignore[misc]
    """Keys and values by page: per layer [num_pages, ...], in the order of `layout`.

    The heads of a page come before its tokens, so that attention multiplies pages of one head without a copy. A KV
    index is page * page_size + offset, as everywhere in SGLang. Page 0 is kept for padding. The kernel gives memory
    when a page is first written.
    """

    def __init__(
        self,
        size: int,
        page_size: int,
        dtype: torch.dtype,
        head_num: int,
        head_dim: int,
        layer_num: int,
        device: str,
        enable_memory_saver: bool,
        start_layer: int | None = None,
        end_layer: int | None = None,
    ) -> None:
        super().__init__(size, page_size, dtype, layer_num, device, enable_memory_saver, start_layer, end_layer)
        num_pages = size // page_size + 1
        self.layout = page_layout(
            heads=head_num,
            page_size=page_size,
            head_dim=head_dim,
            dtype=dtype,
            native=native_kernels() is not None,
        )
        keys, values = (num_pages, *self.layout.key_shape), (num_pages, *self.layout.value_shape)
        all_keys, self.k_pages = lazy_layers(layer_num, keys, dtype)
        all_values, self.v_pages = lazy_layers(layer_num, values, dtype)
        self.all_parts: tuple[torch.Tensor, ...] = (all_keys, all_values)
        """The parts of all layers' pages (keys, values), each [layers * num_pages, ...], one layer after the other."""
        self.first_page = 0
        self.head_num, self.head_dim, self.v_head_dim = head_num, head_dim, head_dim
        self._finalize_allocation_log(size)

    def page_parts(self, layer: int) -> tuple[torch.Tensor, ...]:
        """Return the parts of a layer's pages, each [num_pages, ...]. Layers are counted from this process's first."""
        return self.k_pages[layer], self.v_pages[layer]

    def redirect(self, parts: Sequence[tuple[torch.Tensor, ...]], first_page: int) -> None:
        """Point the layers to other memory: `parts` of each as in page_parts; `first_page` numbers the first page."""
        self.k_pages, self.v_pages = [keys for keys, _ in parts], [values for _, values in parts]
        self.first_page = first_page

    @property
    def native_layout(self) -> bool:
        """Whether pages have the layout of the native kernels."""
        return isinstance(self.layout, PanelLayout)

    def pages_by_head(self, layer_id: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a layer's keys and values [num_pages, heads, page_size, head_dim]. Only for the plain layout."""
        assert not self.native_layout, "packed pages are for the native kernels"
        return self.get_kv_buffer(layer_id)

    def get_key_buffer(self, layer_id: int) -> torch.Tensor:
        return self.k_pages[int(layer_id - self.start_layer)]

    def get_value_buffer(self, layer_id: int) -> torch.Tensor:
        return self.v_pages[int(layer_id - self.start_layer)]

    def get_kv_buffer(self, layer_id: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.get_key_buffer(layer_id), self.get_value_buffer(layer_id)

    def get_kv_size_bytes(self) -> tuple[int, int]:
        return (sum(t.nbytes for t in self.k_pages), sum(t.nbytes for t in self.v_pages))

    def set_kv_buffer(self, layer: Any, loc: Any, cache_k: torch.Tensor, cache_v: torch.Tensor) -> None:
        """Write the keys and values [tokens, num_kv_heads, head_dim] of one layer at the KV indices `loc` [tokens].

        KV indices are counted from the first page of the memory to which the layers point, in all methods of a pool.
        """
        kv_indices, _, _ = unwrap_write_loc(loc)
        self.write_kv(layer.layer_id, kv_indices, cache_k, cache_v)

    def write_kv(self, layer_id: int, kv_indices: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Write keys and values [tokens, num_kv_heads, head_dim] at `kv_indices` [tokens]."""
        keys, values = keys.to(self.dtype), values.to(self.dtype)
        self.layout.write(self.get_kv_buffer(layer_id), kv_indices, keys, values)

    def read_kv(self, layer_id: int, kv_indices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a copy of keys and values [tokens, num_kv_heads, head_dim] at `kv_indices` [tokens]."""
        return self.layout.read(self.get_kv_buffer(layer_id), kv_indices)

    def move_kv_cache(self, tgt_loc: torch.Tensor, src_loc: torch.Tensor) -> None:
        """Copy the tokens at `src_loc` to `tgt_loc` in every layer; source and target must not overlap."""
        for pools in zip(self.k_pages, self.v_pages, strict=True):
            self.layout.write(pools, tgt_loc, *self.layout.read(pools, src_loc))
