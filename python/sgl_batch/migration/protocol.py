"""Owns the two-phase protocol of a migration: one table of transitions for each side. It has no clock, wire or tensor.

A batch is the set of sequences that move from one rank, the sender, to another, the receiver, at one boundary. The
normal run, with the state of each side:

    sender                                receiver
    OFFERED      ---- Offer ---->         AWAITING, JUDGING       reserves room
                 <--- Accept ----         RECEIVING
    SENDING      ==== KV ========>
                 <--- Stored ----         STORED                  has all KV; has adopted nothing yet
    COMMITTING   ---- Commit ---->        OWNED                   has adopted the sequences
    RELEASED     <-- Committed ---                                the sender frees its pages

Who owns the sequences:

- The sender owns them until it has received Stored and sent Commit. The receiver owns them once it has received Commit.
  While Commit is on its way neither side runs them, and the sender still keeps them whole.
- A side may give up alone (after a timeout, a failed transfer or an invalid message) while it knows the owner: the
  sender before it sends Commit, the receiver before it sends Stored. It then sends Abort, and the sender keeps them.
- Later than that, a side that waits cannot know the owner: the sender in COMMITTING, the receiver in STORED. The
  sequences are "in doubt". The side keeps them whole and does not run them until a message arrives or the other side is
  known to be dead. Silence is not death.
- The death of one side decides at once:

    dead side      survivor's state                owner
    receiver       OFFERED, SENDING                the survivor (KEPT)
    receiver       COMMITTING                      the survivor (RECLAIMED), see below
    receiver       RELEASED                        the dead side
    sender         AWAITING, RECEIVING             the dead side (DROPPED)
    sender         STORED                          the dead side (DROPPED): it still held them whole
    sender         OWNED                           the survivor

  Only RECLAIMED can contradict what the dead side held: it may have received Commit, and its Committed was lost with
  it. Its ownership is void, because a dead rank runs nothing and never returns under its number. The survivor resumes
  the sequences from the state in which it offered them. Samples depend on seed and position alone, so it generates the
  same tokens. A collector of tokens must therefore accept tokens a second time that the dead rank had sent already.
  Dropping the sequences instead would lose them where Commit did not arrive.

So two living sides never own a batch at once. While both sides live, exactly one owns it, if Commit on its way counts
as ownership. "Known to be dead" must be true (the channel learns it from the kernel): a living rank that is taken for
dead could be an owner too.
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
    """The sender's state. The value says what the sender awaits, or how its part ended."""

    OFFERED = "Accept or Refuse"
    SENDING = "Stored"
    COMMITTING = "Committed"
    RELEASED = "moved away"
    KEPT = "stayed here"
    RECLAIMED = "taken back from a dead rank"


class SenderEvent(enum.Enum):
    """What can happen to the sender: messages from the receiver, its own decisions, and the receiver's death."""

    ACCEPT = "accept"
    REFUSE = "refuse"
    STORED = "stored"
    COMMITTED = "committed"
    ABORT = "abort"
    GIVE_UP = "give up"
    PEER_DEAD = "peer dead"


class SenderAction(enum.Enum):
    """What the sender does in a transition, in the table's order."""

    SEND_DATA = "send the KV"
    SEND_COMMIT = "send Commit"
    SEND_ABORT = "send Abort"
    STOP_DATA = "abandon the transfer of tensors"
    RELEASE = "free the pages"


class ReceiverState(enum.Enum):
    """The receiver's state. The value says what the receiver awaits, or how its part ended."""

    AWAITING = "Offer"
    JUDGING = "its own store"
    RECEIVING = "the KV"
    STORED = "Commit"
    OWNED = "moved here"
    DROPPED = "not taken"


class ReceiverEvent(enum.Enum):
    """What can happen to the receiver: messages from the sender, its store's answer, and the sender's death."""

    OFFER = "offer"
    FITS = "fits, at least in part"
    FULL = "nothing fits"
    ARRIVED = "all KV has arrived"
    COMMIT = "commit"
    ABORT = "abort"
    GIVE_UP = "give up"
    PEER_DEAD = "peer dead"


class ReceiverAction(enum.Enum):
    """What the receiver does in a transition, in the table's order."""

    JUDGE = "reserve pages for the sequences that fit"
    SEND_ACCEPT = "send Accept"
    SEND_REFUSE = "send Refuse"
    RECEIVE_DATA = "receive the KV"
    SEND_STORED = "send Stored"
    ADOPT = "adopt the sequences"
    SEND_COMMITTED = "send Committed"
    SEND_ABORT = "send Abort"
    FREE = "abandon the transfer of tensors and free the reserved pages"


S = TypeVar("S", bound=SenderState | ReceiverState)
A = TypeVar("A", bound=SenderAction | ReceiverAction)


class Step(NamedTuple, Generic[S, A]):
    """A transition: the next state of a side, and the actions that lead there."""

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
    # Messages that were on their way when the sender gave up, or that arrive twice.
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
    # Messages that were on their way when the receiver gave up, or that arrive twice.
    return table | {(s.DROPPED, event): ReceiverStep(s.DROPPED) for event in (e.OFFER, e.ABORT)}


SENDER_TRANSITIONS = _sender_table()
RECEIVER_TRANSITIONS = _receiver_table()

SENDER_END_STATES = frozenset({SenderState.RELEASED, SenderState.KEPT, SenderState.RECLAIMED})
RECEIVER_END_STATES = frozenset({ReceiverState.OWNED, ReceiverState.DROPPED})


def sender_view(state: SenderState) -> Owner:
    """Return the owner of the batch, as far as the sender knows."""
    if state is SenderState.COMMITTING:
        return Owner.IN_DOUBT
    return Owner.RECEIVER if state is SenderState.RELEASED else Owner.SENDER


def receiver_view(state: ReceiverState) -> Owner:
    """Return the owner of the batch, as far as the receiver knows."""
    if state is ReceiverState.STORED:
        return Owner.IN_DOUBT
    return Owner.RECEIVER if state is ReceiverState.OWNED else Owner.SENDER
