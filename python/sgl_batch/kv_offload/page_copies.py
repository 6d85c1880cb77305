"""Owns which bytes a copy moves between pages in a GPU's memory and blocks of pinned memory. The caller orders copies.

Not yet run on a GPU: tests run the copies on a CPU, run the kernel under Triton's interpreter, and compile it for GPUs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from sgl_batch.kv_offload.store_geometry import StoreGeometry

_CHUNK_WORDS = 1024
_WORD_BYTES = 8
# A kernel fills the link when the bytes in flight are the link's rate times its round trip. For PCIe 5 with 16 lanes
# these are taken as 64 GB/s and 2 us (SGLang reports 1.3 us for its kernel over a GB300's faster link). Not measured.
LINK_BYTES_PER_S = 64e9
ROUND_TRIP_S = 2e-6


def programs_to_fill(bytes_per_s: float, round_trip_s: float) -> int:
    """Return how many programs of the kernel, each with a chunk in flight, fill a link. More only slow compute."""
    return -(-int(bytes_per_s * round_trip_s) // (_CHUNK_WORDS * _WORD_BYTES))


COPY_PROGRAMS = programs_to_fill(LINK_BYTES_PER_S, ROUND_TRIP_S)
"""Programs of the kernel at a time: 16 of 256 threads, of which an SM holds eight. An H200 has 132 SMs."""

Parts = Sequence[Sequence[torch.Tensor]]
"""[layer][part], each uint8 [num_pages, bytes]."""


class PageCopies(Protocol):
    """Copies whole parts of pages between a device's parts and the blocks of a store, uint8 [num_blocks, bytes]."""

    def __call__(self, to_store: bool, layers: range, pages: torch.Tensor, blocks: torch.Tensor) -> None:
        """Give torch's current stream copies of layers of pages[i] to blocks[i], or back; both int64 on the host."""


class PerPageCopy:
    """One torch copy for each part of each page, made by the GPU's copy engines: they take no time from compute."""

    def __init__(self, parts: Parts, blocks: torch.Tensor, geometry: StoreGeometry) -> None:
        self._parts, self._blocks, self._geometry = parts, blocks, geometry

    def __call__(self, to_store: bool, layers: range, pages: torch.Tensor, blocks: torch.Tensor) -> None:
        geometry, pairs = self._geometry, list(zip(pages.tolist(), blocks.tolist(), strict=True))
        for layer in layers:
            for part, offset in zip(self._parts[layer], geometry.part_offsets, strict=True):
                begin = layer * geometry.layer_bytes + offset
                part_of_blocks = self._blocks[:, begin : begin + part.shape[1]]
                for page, block in pairs:
                    target, source = (
                        (part_of_blocks[block], part[page]) if to_store else (part[page], part_of_blocks[block])
                    )
                    target.copy_(source, non_blocking=True)


class FusedPageCopy:
    """One kernel for all pages, which reads and writes pinned memory: a launch costs the same for any number of pages.

    Pinned memory has the same address on the GPU as on the host, as on every 64-bit Linux. Parts are whole words of 8
    bytes, see `serves`.
    """

    def __init__(self, parts: Parts, blocks: torch.Tensor, geometry: StoreGeometry) -> None:
        # Imported here, because a CPU does not need Triton.
        from sgl_batch.kv_offload.page_copy_kernel import copy_pages_kernel

        self._kernel, self._blocks, self._geometry = copy_pages_kernel, blocks, geometry
        device = parts[0][0].device
        self._parts = parts  # keeps them alive: the kernel has their addresses
        self._addresses = torch.tensor([part.data_ptr() for layer in parts for part in layer], device=device)
        numbers = [
            [size // _WORD_BYTES, offset // _WORD_BYTES]
            for size, offset in zip(geometry.part_bytes, geometry.part_offsets, strict=True)
        ]
        self._words = torch.tensor(numbers, dtype=torch.int64, device=device)

    @staticmethod
    def serves(geometry: StoreGeometry) -> bool:
        """Whether all parts of this geometry are whole words."""
        return all(size % _WORD_BYTES == 0 for size in geometry.part_bytes)

    def __call__(self, to_store: bool, layers: range, pages: torch.Tensor, blocks: torch.Tensor) -> None:
        if not len(pages):
            return
        device, geometry = self._addresses.device, self._geometry
        pairs = torch.stack((pages, blocks))
        if device.type == "cuda":
            pairs = pairs.pin_memory()  # a copy from pageable memory would block the host
        pairs = pairs.to(device, non_blocking=True)
        num_parts = len(geometry.part_bytes)
        total = len(pages) * len(layers) * num_parts
        self._kernel[(min(total, COPY_PROGRAMS),)](
            self._addresses, self._words, pairs[0], pairs[1], self._blocks.data_ptr(),
            geometry.block_bytes // _WORD_BYTES, geometry.layer_bytes // _WORD_BYTES,
            layers.start, len(layers), num_parts, total,
            TO_STORE=to_store, CHUNK=_CHUNK_WORDS, num_warps=8,
        )  # fmt: skip
