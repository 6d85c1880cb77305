"""The coroutine primitives (BatchGen 4.2) over sequences. They change states; effects live with the caller."""

from __future__ import annotations

from collections.abc import Iterable

from sgl_batch.core.coroutine import Event, Transition, advance
from sgl_batch.core.sequence import SequenceState


def yield_(sequence: SequenceState, *, finished: bool, why: str) -> Transition:
    """Give control back after prefill: the sequence is READY with its KV kept, or FINISHED."""
    return advance(sequence, Event.FINISH if finished else Event.YIELD_PREFILLED, why)


def combine(sequences: Iterable[SequenceState], event: Event, why: str) -> list[Transition]:
    """Resume sequences by combining them into one group; `event` says for which phase."""
    assert event in (Event.COMBINE_PREFILL, Event.COMBINE_DECODE), f"{event.name} combines nothing"
    return [advance(sequence, event, why) for sequence in sequences]


def migrate(sequence: SequenceState, event: Event, why: str) -> Transition:
    """A sequence leaves this rank with its KV and state, or goes on here as READY."""
    assert event in (Event.DEPART, Event.ARRIVE), f"{event.name} is no migration"
    return advance(sequence, event, why)
