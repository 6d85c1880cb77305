"""Owns where the layers and parts of a page lie in a block of the host KV store.

A block holds one page in all layers: layer after layer, each layer's parts one after the other, then its checksum if
checksums are on. Parts begin at multiples of 64 bytes, blocks at multiples of 4096.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from sgl_batch.errors import ConfigError

_PART_ALIGNMENT = 64
_BLOCK_ALIGNMENT = 4096
_CHECKSUM_BYTES = 8


class PagedPool(Protocol):
    """The pages of a device tier, in layers."""

    layer_num: int

    def page_parts(self, layer: int) -> tuple[torch.Tensor, ...]:
        """Return the parts of a layer's pages (keys and values, say), each [num_pages, ...]."""


def _aligned(num_bytes: int, alignment: int) -> int:
    return -(-num_bytes // alignment) * alignment


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreGeometry:
    """The sizes of a page. `part_bytes`: bytes of each part of a layer. All layers are alike."""

    num_layers: int
    part_bytes: tuple[int, ...]
    checksums: bool = False

    @classmethod
    def of_pool(cls, pool: PagedPool, *, checksums: bool = False) -> StoreGeometry:
        """Return the geometry of a pool's pages. Raises ConfigError if its layers differ."""
        sizes = {
            tuple(part[0].numel() * part.element_size() for part in pool.page_parts(layer))
            for layer in range(pool.layer_num)
        }
        if len(sizes) != 1:
            raise ConfigError(
                f"pages of this model have {len(sizes)} different sizes in its layers ({sorted(sizes)} bytes); the "
                "host KV store supports one size: run without a store"
            )
        return cls(num_layers=pool.layer_num, part_bytes=sizes.pop(), checksums=checksums)

    @property
    def part_offsets(self) -> tuple[int, ...]:
        """The offset of each part in its layer, in bytes."""
        offsets, end = [], 0
        for num_bytes in self.part_bytes:
            offsets.append(end)
            end = _aligned(end + num_bytes, _PART_ALIGNMENT)
        return tuple(offsets)

    @property
    def checksum_offset(self) -> int | None:
        """The offset of a layer's checksum in the layer, in bytes; None without checksums."""
        if not self.checksums:
            return None
        return _aligned(self.part_offsets[-1] + self.part_bytes[-1], _PART_ALIGNMENT)

    @property
    def layer_bytes(self) -> int:
        """Bytes from one layer to the next."""
        end = self.part_offsets[-1] + self.part_bytes[-1]
        if self.checksum_offset is not None:
            end = self.checksum_offset + _CHECKSUM_BYTES
        return _aligned(end, _PART_ALIGNMENT)

    @property
    def block_bytes(self) -> int:
        """Bytes from one block to the next: what a page takes in the store."""
        return _aligned(self.num_layers * self.layer_bytes, _BLOCK_ALIGNMENT)

    def numbers(self, num_blocks: int) -> list[int]:
        """Return this geometry as the native library takes it."""
        offset = self.checksum_offset
        parts = zip(self.part_bytes, self.part_offsets, strict=True)
        head = [num_blocks, self.num_layers, self.layer_bytes, self.block_bytes, -1 if offset is None else offset]
        return head + [number for part in parts for number in part]
