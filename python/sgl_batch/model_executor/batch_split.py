"""Owns cutting a group's forward batch into attention sub-batches. Which rows these are is given."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

from sgl_batch.core.plan import cut_sequences
from sgl_batch.sglang_adapter.forward import decode_slice, extend_slice


@dataclass(slots=True, kw_only=True)
class SubBatch:
    """Rows [start, end) of a group, the forward batch that describes them, and the attention plan for it."""

    span: tuple[int, int]
    forward_batch: Any
    attention_plan: Any = None


def split(forward_batch: Any, spans: list[tuple[int, int]], *, first_slot: int = 0) -> list[SubBatch]:
    """Sub-batches of rows `spans`, which cover every row once.

    `first_slot`: the slot with which the memory begins to which KV is written.
    """
    if first_slot:
        forward_batch = copy.copy(forward_batch)
        forward_batch.out_cache_loc = forward_batch.out_cache_loc - first_slot
    if len(spans) == 1:
        return [SubBatch(span=spans[0], forward_batch=forward_batch)]
    cut = _decode_part if forward_batch.forward_mode.is_decode() else _extend_part
    return [SubBatch(span=span, forward_batch=cut(forward_batch, span)) for span in spans]


def _decode_part(forward_batch: Any, span: tuple[int, int]) -> Any:
    return decode_slice(forward_batch, *span)


def _extend_part(forward_batch: Any, span: tuple[int, int]) -> Any:
    pieces = cut_sequences(forward_batch.extend_seq_lens_cpu, span)
    prefixes = forward_batch.extend_prefix_lens_cpu
    return extend_slice(
        forward_batch,
        *span,
        sequences=[piece.index for piece in pieces],
        prefix_lens=[prefixes[piece.index] + piece.start for piece in pieces],
        extend_lens=[piece.end - piece.start for piece in pieces],
    )
