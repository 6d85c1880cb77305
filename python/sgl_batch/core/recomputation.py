"""Owns the account of KV that is computed a second time. Whether to recompute is decided elsewhere."""

from __future__ import annotations

from dataclasses import dataclass

from sgl_batch.core.sequence import SequenceState


@dataclass(frozen=True, slots=True, kw_only=True)
class Recomputed:
    """Tokens whose KV a prefill computes again: as planned, and unplanned, which must always be 0."""

    planned: int = 0
    unplanned: int = 0


def note_prefill(sequence: SequenceState, start: int, end: int) -> Recomputed:
    """Note that a prefill computes a sequence's KV at positions [start, end), and return what of it is computed again.

    Planned: the KV of a retracted sequence; and of a choice other than its group's leader, the last token of the
    prompt, from which it samples, and all of a prompt that it cannot share. KV that a sequence has is never to be
    computed again otherwise: that is unplanned.
    """
    before, sequence.computed_tokens = sequence.computed_tokens, max(sequence.computed_tokens, end)
    again = max(0, min(before, end) - start)
    lost, sequence.lost_tokens = max(0, min(sequence.lost_tokens, end) - start), 0
    follows = before == 0 and sequence.prompt_group is not None and not sequence.is_leader
    return Recomputed(planned=end - start if follows else lost, unplanned=again)
