"""Owns the account of KV that is computed a second time. Whether that is worth it is decided elsewhere."""

from __future__ import annotations

from dataclasses import dataclass

from sgl_batch.core.sequence import SequenceState


@dataclass(frozen=True, slots=True, kw_only=True)
class Recomputed:
    """Tokens whose KV a prefill computes although it was there before: by the plan, and against it."""

    planned: int = 0
    unplanned: int = 0


def note_prefill(sequence: SequenceState, start: int, end: int) -> Recomputed:
    """Note that a prefill computes a sequence's KV at positions [start, end), and say what of it had been computed.

    What a sequence has had itself is never to be computed again, unless it was retracted. A choice that is not its
    prompt's leader computes the last token of the prompt again, to sample from it, and all of a prompt that it cannot
    share: that is the plan.
    """
    before, sequence.computed_tokens = sequence.computed_tokens, max(sequence.computed_tokens, end)
    again = max(0, min(before, end) - start)
    lost, sequence.lost_tokens = max(0, min(sequence.lost_tokens, end) - start), 0
    follows = before == 0 and sequence.prompt_group is not None and not sequence.is_leader
    return Recomputed(planned=end - start if follows else lost, unplanned=again)
