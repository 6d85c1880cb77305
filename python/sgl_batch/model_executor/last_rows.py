"""Owns which rows a pass still computes in the last layer, once it has written that layer's KV.

Of a prompt the head reads the last token alone, or those whose log probabilities are asked for. No other row of the
last layer's output is read: behind attention that layer computes these rows only, and where the attention backend can,
in attention as well.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sgl_batch.core.plan import cut_sequences
from sgl_batch.model_executor.batch_split import SubBatch
from sgl_batch.model_executor.group_pass import LastRows, Part
from sgl_batch.sglang_adapter.host_copies import upload
from sgl_batch.sglang_adapter.types.models import AttentionBackend


def last_rows(parts: Sequence[Part], attn_backend: AttentionBackend, *, by_sub_batch: bool) -> list[LastRows] | None:
    """Return what the last layer keeps of each sub-batch of a pass, or None where it keeps every row.

    Args:
        parts: the pass; its sub-batches have their attention metadata.
        attn_backend: may attend with the kept rows alone (`of_last_rows`).
        by_sub_batch: whether each sub-batch is a group of its own. Otherwise all are one.
    """
    kept: list[LastRows] = []
    end = 0
    for part in parts:
        for sub in part.sub_batches:
            first = 0 if by_sub_batch else end
            one = _of_all(sub, first) if part.read is None else _of_last(part, sub, part.read, first, attn_backend)
            end = one.span[1]
            kept.append(one)
    return kept if any(one.index is not None for one in kept) else None


def _of_all(sub: SubBatch, first: int) -> LastRows:
    return LastRows(span=(first, first + sub.span[1] - sub.span[0]), index=None, attn_metadata=sub.attn_metadata)


def _of_last(part: Part, sub: SubBatch, counts: Sequence[int], first: int, attn_backend: AttentionBackend) -> LastRows:
    lengths = part.batch.extend_seq_lens_cpu
    assert lengths is not None, "a batch of prompts has the lengths of its sequences"
    rows: list[int] = []
    counts_of_pieces, piece_end = [], 0
    for piece in cut_sequences(lengths, (sub.span[0] - part.span[0], sub.span[1] - part.span[0])):
        piece_end += piece.end - piece.start
        count = max(0, piece.end - max(piece.start, lengths[piece.index] - counts[piece.index]))
        counts_of_pieces.append(count)
        rows.extend(range(piece_end - count, piece_end))
    if len(rows) == piece_end:
        return _of_all(sub, first)
    span = (first, first + len(rows))
    # In the middle of a prompt none is kept, and modules of a layer are not called without rows.
    index = upload(rows or [0], torch.int64, part.batch.input_ids.device)
    of_last_rows, metadata = getattr(attn_backend, "of_last_rows", None), sub.attn_metadata
    if rows and of_last_rows is not None:
        metadata = of_last_rows(metadata, counts_of_pieces, index)
    return LastRows(span=span, index=index, attn_metadata=metadata)
