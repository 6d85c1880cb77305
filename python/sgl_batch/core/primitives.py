"""Owns the coroutine primitives (BatchGen 4.2). They change the state of sequences; the caller carries out effects."""

from __future__ import annotations

from collections.abc import Iterable

from sgl_batch.core.coroutine import Event, Transition, advance
from sgl_batch.core.sequence import SequenceState


def yield_(sequence: SequenceState, *, finished: bool, why: str) -> Transition:
    """Yield after prefill: the sequence becomes READY and keeps its KV, or FINISHED."""
    return advance(sequence, Event.FINISH if finished else Event.YIELD_PREFILLED, why)


def combine(sequences: Iterable[SequenceState], event: Event, why: str) -> list[Transition]:
    """Resume sequences by combining them into one group. `event`: the phase, COMBINE_PREFILL or COMBINE_DECODE."""
    assert event in (Event.COMBINE_PREFILL, Event.COMBINE_DECODE), f"{event.name} combines nothing"
    return [advance(sequence, event, why) for sequence in sequences]


def partition(sequence: SequenceState, ranks: frozenset[int], why: str) -> Transition:
    """Let a running sequence belong to these ranks from now on: to several, or again to its owner alone."""
    sequence.ranks = ranks
    return advance(sequence, Event.PARTITION if len(ranks) > 1 else Event.END_PARTITION, why)


def migrate(sequence: SequenceState, event: Event, why: str) -> Transition:
    """Let a sequence leave this rank with its KV and state (DEPART), or continue here as READY (ARRIVE)."""
    assert event in (Event.DEPART, Event.ARRIVE), f"{event.name} is no migration"
    return advance(sequence, event, why)
