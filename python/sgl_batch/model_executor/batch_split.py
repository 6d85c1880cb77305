"""Owns cutting a part of a pass into attention sub-batches, at rows that the caller gives."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass

from sgl_batch.core.plan import cut_sequences
from sgl_batch.model_executor.kv_staging import Staging
from sgl_batch.sglang_adapter.forward import decode_slice, extend_slice
from sgl_batch.sglang_adapter.types.batches import ForwardBatch


@dataclass(slots=True, kw_only=True)
class SubBatch:
    """Rows [start, end) of a pass, the forward batch that describes them, and its attention metadata.

    `number`: its index in its part of the pass; `end_in_part`: its last row plus one, counted in the part; `staging`:
    the part's.
    """

    span: tuple[int, int]
    forward_batch: ForwardBatch
    attn_metadata: object = None
    number: int = 0
    end_in_part: int = 0
    staging: Staging | None = None


def split(
    forward_batch: ForwardBatch, spans: Sequence[tuple[int, int]], *, staging: Staging | None = None, first_row: int = 0
) -> list[SubBatch]:
    """Return the sub-batches of a part, one for each of the row ranges `spans`, which cover every row once.

    `staging`: the memory through which the part's KV passes; `first_row`: the row of the pass with which the part
    begins.
    """
    if staging is not None:
        forward_batch = copy.copy(forward_batch)
        forward_batch.out_cache_loc = forward_batch.out_cache_loc - staging.first_kv_index
    cut = _whole if len(spans) == 1 else _decode_part if forward_batch.forward_mode.is_decode() else _extend_part
    return [
        SubBatch(
            span=(first_row + start, first_row + end),
            forward_batch=cut(forward_batch, (start, end)),
            number=number,
            end_in_part=end,
            staging=staging,
        )
        for number, (start, end) in enumerate(spans)
    ]


def _whole(forward_batch: ForwardBatch, span: tuple[int, int]) -> ForwardBatch:
    return forward_batch


def _decode_part(forward_batch: ForwardBatch, span: tuple[int, int]) -> ForwardBatch:
    return decode_slice(forward_batch, *span)


def _extend_part(forward_batch: ForwardBatch, span: tuple[int, int]) -> ForwardBatch:
    lengths, prefixes = forward_batch.extend_seq_lens_cpu, forward_batch.extend_prefix_lens_cpu
    assert lengths is not None, "an extend batch has the lengths of its sequences"
    assert prefixes is not None, "an extend batch has the number of tokens of each that were computed before"
    pieces = cut_sequences(lengths, span)
    return extend_slice(
        forward_batch,
        *span,
        sequences=[piece.index for piece in pieces],
        prefix_lens=[prefixes[piece.index] + piece.start for piece in pieces],
        extend_lens=[piece.end - piece.start for piece in pieces],
    )
