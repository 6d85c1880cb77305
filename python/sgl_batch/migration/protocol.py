"""Owns the two-phase protocol: one table of transitions for each side. Does nothing; has no clock, wire or tensor.

    sender                                receiver
    OFFERED      ---- Offer ---->         AWAITING, JUDGING       room is reserved
                 <--- Accept ----         RECEIVING
    SENDING      ==== KV ========>
                 <--- Stored ----         STORED                  all is there, nothing is adopted
    COMMITTING   ---- Commit ---->        OWNED                   adopted
    RELEASED     <-- Committed ---                                the sender frees its pages

Who owns the sequences of a batch:

- The sender, until it has seen Stored and sent Commit; the receiver, from its receipt of Commit on. While Commit is on
  its way the sender runs them no more but keeps them whole, and the receiver does not run them yet.
- Each side may give up by itself (a timeout, a failed transfer, a message that makes no sense) while it knows whose
  they are: the sender before Commit, the receiver before Stored. Then Abort tells the other; they stay with the sender.
- In between a side that merely waits cannot know: a sender in COMMITTING, a receiver in STORED. It goes on holding them
  without running them ("in doubt") until a message comes, or the other is known to be dead. Silence is not death.
- Death of the other decides at once:

    the dead one   the survivor's state            owner
    receiver       OFFERED, SENDING                the survivor (KEPT)
    receiver       COMMITTING                      the survivor (RECLAIMED), see below
    receiver       RELEASED                        the dead one
    sender         AWAITING, RECEIVING             the dead one (DROPPED)
    sender         STORED                          the dead one (DROPPED): it still held them whole
    sender         OWNED                           the survivor

  Only RECLAIMED may contradict what the dead one held: it may have received Commit, and its Committed was lost with it.
  Its claim is void, since a dead rank runs nothing and never comes back under its number. The survivor goes on from the
  state in which they were offered, and, because samples depend on seed and position alone, to the same tokens; who
  collects tokens must expect to see again those that the dead rank gave out in between. Giving them up instead
  would lose them where the Commit did not arrive.

So there are never two owners alive, and as long as both live there is always exactly one, if Commit on its way counts.
"Known to be dead" must be true (the channel has it from the kernel): a living rank taken for dead could own as well.
"""

from __future__ import annotations

import enum
from typing import Generic, NamedTuple, TypeVar


class Owner(enum.Enum):
    """Who owns a batch, as one side sees it."""

    SENDER = "sender"
    RECEIVER = "receiver"
    IN_DOUBT = "in doubt"


class SenderState(enum.Enum):
    """Where the sender stands; the value says what it awaits, or how it ended."""

    OFFERED = "Accept or Refuse"
    SENDING = "Stored"
    COMMITTING = "Committed"
    RELEASED = "moved away"
    KEPT = "stayed here"
    RECLAIMED = "taken back from a dead rank"


class SenderEvent(enum.Enum):
    """What can happen to the sender: messages from the receiver, and what it learns by itself."""

    ACCEPT = "accept"
    REFUSE = "refuse"
    STORED = "stored"
    COMMITTED = "committed"
    ABORT = "abort"
    GIVE_UP = "give up"
    PEER_DEAD = "peer dead"


class SenderAction(enum.Enum):
    """What the sender then does, in the order given."""

    SEND_DATA = "send the KV"
    SEND_COMMIT = "send Commit"
    SEND_ABORT = "send Abort"
    STOP_DATA = "let go of the tensors under way"
    RELEASE = "free the pages"


class ReceiverState(enum.Enum):
    """Where the receiver stands; the value says what it awaits, or how it ended."""

    AWAITING = "Offer"
    JUDGING = "its own store"
    RECEIVING = "the KV"
    STORED = "Commit"
    OWNED = "moved here"
    DROPPED = "not taken"


class ReceiverEvent(enum.Enum):
    """What can happen to the receiver: messages from the sender, and what it learns by itself."""

    OFFER = "offer"
    FITS = "fits, at least in part"
    FULL = "nothing fits"
    ARRIVED = "all KV has arrived"
    COMMIT = "commit"
    ABORT = "abort"
    GIVE_UP = "give up"
    PEER_DEAD = "peer dead"


class ReceiverAction(enum.Enum):
    """What the receiver then does, in the order given."""

    JUDGE = "reserve pages, as far as there are any"
    SEND_ACCEPT = "send Accept"
    SEND_REFUSE = "send Refuse"
    RECEIVE_DATA = "receive the KV"
    SEND_STORED = "send Stored"
    ADOPT = "adopt the sequences"
    SEND_COMMITTED = "send Committed"
    SEND_ABORT = "send Abort"
    FREE = "let go of the tensors under way and free the reserved pages"


S = TypeVar("S", bound=SenderState | ReceiverState)
A = TypeVar("A", bound=SenderAction | ReceiverAction)


class Step(NamedTuple, Generic[S, A]):
    """The next state of a side and what it does on the way."""

    state: S
    actions: tuple[A, ...] = ()


SenderStep = Step[SenderState, SenderAction]
ReceiverStep = Step[ReceiverState, ReceiverAction]


def _sender_table() -> dict[tuple[SenderState, SenderEvent], SenderStep]:
    s, e, a = SenderState, SenderEvent, SenderAction
    table = {
        (s.OFFERED, e.ACCEPT): SenderStep(s.SENDING, (a.SEND_DATA,)),
        (s.OFFERED, e.REFUSE): SenderStep(s.KEPT),
        (s.OFFERED, e.ABORT): SenderStep(s.KEPT),
        (s.OFFERED, e.GIVE_UP): SenderStep(s.KEPT, (a.SEND_ABORT,)),
        (s.OFFERED, e.PEER_DEAD): SenderStep(s.KEPT),
        (s.SENDING, e.ACCEPT): SenderStep(s.SENDING),
        (s.SENDING, e.STORED): SenderStep(s.COMMITTING, (a.SEND_COMMIT,)),
        (s.SENDING, e.ABORT): SenderStep(s.KEPT, (a.STOP_DATA,)),
        (s.SENDING, e.GIVE_UP): SenderStep(s.KEPT, (a.STOP_DATA, a.SEND_ABORT)),
        (s.SENDING, e.PEER_DEAD): SenderStep(s.KEPT, (a.STOP_DATA,)),
        (s.COMMITTING, e.ACCEPT): SenderStep(s.COMMITTING),
        (s.COMMITTING, e.STORED): SenderStep(s.COMMITTING),
        (s.COMMITTING, e.COMMITTED): SenderStep(s.RELEASED, (a.RELEASE,)),
        (s.COMMITTING, e.GIVE_UP): SenderStep(s.COMMITTING),
        (s.COMMITTING, e.PEER_DEAD): SenderStep(s.RECLAIMED, (a.STOP_DATA,)),
        (s.RELEASED, e.ACCEPT): SenderStep(s.RELEASED),
        (s.RELEASED, e.STORED): SenderStep(s.RELEASED),
        (s.RELEASED, e.COMMITTED): SenderStep(s.RELEASED),
    }
    # What was on its way when the sender had given up, or comes twice.
    late = (e.ACCEPT, e.REFUSE, e.STORED, e.ABORT)
    return table | {(s.KEPT, event): SenderStep(s.KEPT) for event in late}


def _receiver_table() -> dict[tuple[ReceiverState, ReceiverEvent], ReceiverStep]:
    s, e, a = ReceiverState, ReceiverEvent, ReceiverAction
    table = {
        (s.AWAITING, e.OFFER): ReceiverStep(s.JUDGING, (a.JUDGE,)),
        (s.AWAITING, e.ABORT): ReceiverStep(s.DROPPED),
        (s.AWAITING, e.GIVE_UP): ReceiverStep(s.DROPPED, (a.SEND_ABORT,)),
        (s.AWAITING, e.PEER_DEAD): ReceiverStep(s.DROPPED),
        (s.JUDGING, e.FITS): ReceiverStep(s.RECEIVING, (a.SEND_ACCEPT, a.RECEIVE_DATA)),
        (s.JUDGING, e.FULL): ReceiverStep(s.DROPPED, (a.SEND_REFUSE,)),
        (s.RECEIVING, e.OFFER): ReceiverStep(s.RECEIVING),
        (s.RECEIVING, e.ARRIVED): ReceiverStep(s.STORED, (a.SEND_STORED,)),
        (s.RECEIVING, e.ABORT): ReceiverStep(s.DROPPED, (a.FREE,)),
        (s.RECEIVING, e.GIVE_UP): ReceiverStep(s.DROPPED, (a.FREE, a.SEND_ABORT)),
        (s.RECEIVING, e.PEER_DEAD): ReceiverStep(s.DROPPED, (a.FREE,)),
        (s.STORED, e.OFFER): ReceiverStep(s.STORED),
        (s.STORED, e.COMMIT): ReceiverStep(s.OWNED, (a.ADOPT, a.SEND_COMMITTED)),
        (s.STORED, e.ABORT): ReceiverStep(s.DROPPED, (a.FREE,)),
        (s.STORED, e.GIVE_UP): ReceiverStep(s.STORED),
        (s.STORED, e.PEER_DEAD): ReceiverStep(s.DROPPED, (a.FREE,)),
        (s.OWNED, e.OFFER): ReceiverStep(s.OWNED),
        (s.OWNED, e.COMMIT): ReceiverStep(s.OWNED),
    }
    # What was on its way when the receiver had given up, or comes twice.
    return table | {(s.DROPPED, event): ReceiverStep(s.DROPPED) for event in (e.OFFER, e.ABORT)}


SENDER_TRANSITIONS = _sender_table()
RECEIVER_TRANSITIONS = _receiver_table()

SENDER_END_STATES = frozenset({SenderState.RELEASED, SenderState.KEPT, SenderState.RECLAIMED})
RECEIVER_END_STATES = frozenset({ReceiverState.OWNED, ReceiverState.DROPPED})


def sender_view(state: SenderState) -> Owner:
    """Whose the batch is as the sender knows it."""
    if state is SenderState.COMMITTING:
        return Owner.IN_DOUBT
    return Owner.RECEIVER if state is SenderState.RELEASED else Owner.SENDER


def receiver_view(state: ReceiverState) -> Owner:
    """Whose the batch is as the receiver knows it."""
    if state is ReceiverState.STORED:
        return Owner.IN_DOUBT
    return Owner.RECEIVER if state is ReceiverState.OWNED else Owner.SENDER
