"""Counts which share of streamed experts stays in memory: what passes and written pages of KV leave, as in an engine.

core/weight_residency decides how many experts stay in so much memory. An engine reads past the page cache, so no other
memory keeps experts.
"""

from __future__ import annotations

from dataclasses import dataclass

from sgl_batch.core.weight_residency import plan_residency

# The operating system gives memory for KV by huge pages, each of which is of one layer.
_HUGE_PAGE_BYTES = 2 << 20
_KEYS_AND_VALUES = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertRoom:
    """The memory that streamed experts share with pages of KV on one rank.

    Attributes:
        prefill, decode: Bytes for experts and KV beside a pass of that phase.
        page_bytes: Bytes that a page of KV takes of them once it is written; 0 where experts have memory of their own.
        stride: Pages of KV that take memory together.
        slot_bytes: Bytes of an expert.
        layers, experts: Layers that have experts, and the experts of each.
    """

    prefill: int
    decode: int
    page_bytes: int
    stride: int
    slot_bytes: int
    layers: int
    experts: int

    def kept_share(self, *, decode: bool, pages: int) -> float:
        """Return the share of each layer's experts that stays between passes of a phase, with so many pages written."""
        touched = -(-pages // self.stride) * self.stride * self.page_bytes
        slots = ((self.decode if decode else self.prefill) - touched) // self.slot_bytes
        slots = min(max(slots, self.experts), self.layers * self.experts)
        return plan_residency(slots, layers=self.layers, experts=self.experts).kept / self.experts


def page_stride(page_bytes: int, num_layers: int) -> int:
    """Return how many pages of KV, of so many bytes in all layers, take memory together."""
    return max(1, _HUGE_PAGE_BYTES * num_layers * _KEYS_AND_VALUES // page_bytes)
