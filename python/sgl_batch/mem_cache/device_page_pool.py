"""Owns the device tier's KV pages of multi-head attention on a CPU. It does not decide who gets which page."""

from __future__ import annotations

import math
import mmap
from typing import Any

import torch

from sgl_batch.sglang_adapter.memory import KVCache, unwrap_write_loc


def _lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Zeros whose memory the kernel gives on first write; torch.zeros would touch a pool of gigabytes at start."""
    memory = mmap.mmap(-1, math.prod(shape) * dtype.itemsize)
    return torch.frombuffer(memory, dtype=dtype).view(shape)


class DevicePagePool(KVCache):  # type: ignore[misc]
    """Keys and values by page: per layer [num_pages, num_kv_heads, page_size, head_dim].

    Heads stand before the tokens of a page, so that a page of one head is one contiguous matrix and decode
    attention multiplies pages as they lie. A slot is page * page_size + offset, as everywhere in SGLang; page 0
    is kept for padding. Memory is claimed by the kernel when a page is first written.
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
        shape = (size // page_size + 1, head_num, page_size, head_dim)
        self.k_pages: list[torch.Tensor] = [_lazy_zeros(shape, dtype) for _ in range(layer_num)]
        self.v_pages: list[torch.Tensor] = [_lazy_zeros(shape, dtype) for _ in range(layer_num)]
        self.head_num, self.head_dim, self.v_head_dim = head_num, head_dim, head_dim
        self._finalize_allocation_log(size)

    def get_key_buffer(self, layer_id: int) -> torch.Tensor:
        return self.k_pages[int(layer_id - self.start_layer)]

    def get_value_buffer(self, layer_id: int) -> torch.Tensor:
        return self.v_pages[int(layer_id - self.start_layer)]

    def get_kv_buffer(self, layer_id: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.get_key_buffer(layer_id), self.get_value_buffer(layer_id)

    def get_kv_size_bytes(self) -> tuple[int, int]:
        return (sum(t.nbytes for t in self.k_pages), sum(t.nbytes for t in self.v_pages))

    def set_kv_buffer(self, layer: Any, loc: Any, cache_k: torch.Tensor, cache_v: torch.Tensor) -> None:
        """Write the keys and values [tokens, num_kv_heads, head_dim] of one layer at slots `loc` [tokens]."""
        slots, _, _ = unwrap_write_loc(loc)
        pages, offsets = slots // self.page_size, slots % self.page_size
        keys, values = self.get_kv_buffer(layer.layer_id)
        keys[pages, :, offsets] = cache_k.to(self.dtype)
        values[pages, :, offsets] = cache_v.to(self.dtype)

    def read_slots(self, layer_id: int, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [tokens, num_kv_heads, head_dim] at `slots` [tokens]: a copy."""
        pages, offsets = slots // self.page_size, slots % self.page_size
        keys, values = self.get_kv_buffer(layer_id)
        return keys[pages, :, offsets], values[pages, :, offsets]

    def move_kv_cache(self, tgt_loc: torch.Tensor, src_loc: torch.Tensor) -> None:
        """Copy the slots `src_loc` to `tgt_loc` in every layer; source and target must not overlap."""
        size = self.page_size
        source, target = (src_loc // size, src_loc % size), (tgt_loc // size, tgt_loc % size)
        for pages in (*self.k_pages, *self.v_pages):
            pages[target[0], :, target[1]] = pages[source[0], :, source[1]]
