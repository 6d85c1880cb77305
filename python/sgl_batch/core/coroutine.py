"""Owns the one table of a sequence's state transitions. When an event happens is decided elsewhere."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from sgl_batch.core.sequence import SequenceState, Status


class Event(enum.Enum):
    """What can happen to a sequence."""

    COMBINE_PREFILL = "combined into a prefill group"
    YIELD_PREFILLED = "yielded after prefill"
    COMBINE_DECODE = "combined into the decode group"
    SUSPEND = "suspended"
    RETRACT = "retracted"
    DEPART = "gone to another rank"
    ARRIVE = "arrived from another rank"
    PARTITION = "partitioned over several ranks"
    END_PARTITION = "back on one rank"
    REPLICATE = "replicated to this rank"
    FINISH = "finished"
    ABORT = "aborted"


TRANSITIONS: dict[tuple[Status, Event], Status] = {
    (Status.QUEUED, Event.COMBINE_PREFILL): Status.PREFILLING,
    (Status.QUEUED, Event.ABORT): Status.ABORTED,
    (Status.QUEUED, Event.DEPART): Status.MIGRATING,
    (Status.PREFILLING, Event.YIELD_PREFILLED): Status.READY,
    (Status.PREFILLING, Event.FINISH): Status.FINISHED,
    (Status.PREFILLING, Event.ABORT): Status.ABORTED,
    (Status.PREFILLING, Event.RETRACT): Status.QUEUED,
    (Status.READY, Event.COMBINE_DECODE): Status.RUNNING,
    (Status.RUNNING, Event.SUSPEND): Status.SUSPENDED,
    (Status.SUSPENDED, Event.COMBINE_DECODE): Status.RUNNING,
    (Status.READY, Event.RETRACT): Status.QUEUED,
    (Status.RUNNING, Event.RETRACT): Status.QUEUED,
    (Status.SUSPENDED, Event.RETRACT): Status.QUEUED,
    (Status.SUSPENDED, Event.ABORT): Status.ABORTED,
    (Status.READY, Event.ABORT): Status.ABORTED,
    (Status.READY, Event.DEPART): Status.MIGRATING,
    (Status.RUNNING, Event.DEPART): Status.MIGRATING,
    (Status.SUSPENDED, Event.DEPART): Status.MIGRATING,
    (Status.MIGRATING, Event.ARRIVE): Status.READY,
    (Status.MIGRATING, Event.ABORT): Status.ABORTED,
    (Status.RUNNING, Event.PARTITION): Status.RUNNING,
    (Status.RUNNING, Event.END_PARTITION): Status.RUNNING,
    (Status.MIGRATING, Event.REPLICATE): Status.REPLICA,
    (Status.REPLICA, Event.DEPART): Status.MIGRATING,
    (Status.REPLICA, Event.FINISH): Status.FINISHED,
    (Status.REPLICA, Event.ABORT): Status.ABORTED,
    (Status.RUNNING, Event.FINISH): Status.FINISHED,
    (Status.RUNNING, Event.ABORT): Status.ABORTED,
}

TERMINAL = frozenset({Status.FINISHED, Status.ABORTED})


@dataclass(frozen=True, slots=True, kw_only=True)
class Transition:
    """One change of a sequence's state, as it is written to a trace."""

    sequence_id: str
    before: Status
    after: Status
    event: Event
    why: str


def advance(sequence: SequenceState, event: Event, why: str) -> Transition:
    """Apply `event` to `sequence` in place and return the change.

    Raises AssertionError if the table has no such transition: that is a fault of this program, never of a user.
    """
    before = sequence.status
    after = TRANSITIONS.get((before, event))
    assert after is not None, f"sequence {sequence.sequence_id}: no transition for {event.name} in {before.name}"
    sequence.status = after
    return Transition(sequence_id=sequence.sequence_id, before=before, after=after, event=event, why=why)
