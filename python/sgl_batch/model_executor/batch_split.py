"""Owns cutting a group's forward batch into attention sub-batches. The sizes come from the plan."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sgl_batch.core.plan import cut_sequences, row_spans
from sgl_batch.sglang_adapter.forward import decode_slice, extend_slice


@dataclass(slots=True, kw_only=True)
class SubBatch:
    """Rows [start, end) of a group, the forward batch that describes them, and the attention plan for it."""

    span: tuple[int, int]
    forward_batch: Any
    attention_plan: Any = None


def split(forward_batch: Any, b_attn: int) -> list[SubBatch]:
    """Sub-batches of at most `b_attn` tokens (prefill) or sequences (decode), covering every row once."""
    num_rows = len(forward_batch.input_ids)
    if num_rows <= b_attn:
        return [SubBatch(span=(0, num_rows), forward_batch=forward_batch)]
    cut = _decode_part if forward_batch.forward_mode.is_decode() else _extend_part
    return [SubBatch(span=span, forward_batch=cut(forward_batch, span)) for span in row_spans(num_rows, b_attn)]


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
