"""Callbacks for yield points, as a user writes them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sgl_batch.model_executor.yield_callback import YieldedKV, YieldedSequence

ROUNDED_LAYER = 2


def round_trip(rows: torch.Tensor) -> torch.Tensor:
    """Return rows rounded to int8 and back, with a scale for each token and head."""
    scale = rows.abs().amax(-1, keepdim=True).clamp(min=1e-6) / 127
    return (rows / scale).round().to(torch.int8).to(rows.dtype) * scale


def round_kv(sequences: Sequence[YieldedSequence], layer: int, kv: YieldedKV) -> None:
    """Round the KV of one layer."""
    if layer == ROUNDED_LAYER:
        for sequence in sequences:
            keys, values = kv.get(sequence)
            kv.set(sequence, round_trip(keys), round_trip(values))


def write_what_was_read(sequences: Sequence[YieldedSequence], layer: int, kv: YieldedKV) -> None:
    """Write the KV that was read, which changes nothing."""
    for sequence in sequences:
        assert 0 < sequence.num_new <= sequence.num_tokens
        kv.set(sequence, *kv.get(sequence))


def leave_as_it_is(sequences: Sequence[YieldedSequence], layer: int, kv: YieldedKV) -> None:
    """Write the KV that was read, in batches without requests."""
    assert all(sequence.request_id is None for sequence in sequences), "these batches were made without requests"
    write_what_was_read(sequences, layer, kv)


not_callable = 7
