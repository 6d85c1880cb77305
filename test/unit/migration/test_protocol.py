"""In every run of the protocol, two living sides never own a batch at once, and while both live one of them owns it."""

from __future__ import annotations

import pytest
from protocol_exploration import Exploration, explore

from sgl_batch.migration.protocol import (
    RECEIVER_END_STATES,
    RECEIVER_TRANSITIONS,
    SENDER_END_STATES,
    SENDER_TRANSITIONS,
    Owner,
    ReceiverAction,
    ReceiverEvent,
    ReceiverState,
    ReceiverStep,
    SenderAction,
    SenderEvent,
    SenderState,
    SenderStep,
    receiver_view,
    sender_view,
)

S, R = SenderState, ReceiverState


@pytest.fixture(scope="module")
def found() -> Exploration:
    return explore(SENDER_TRANSITIONS, RECEIVER_TRANSITIONS)


def test_no_run_breaks_a_rule_of_ownership(found):
    assert found.faults == []
    assert len(found.worlds) > 500


def test_every_entry_of_the_tables_can_be_reached(found):
    assert SENDER_TRANSITIONS.keys() - found.sender_used == set()
    assert RECEIVER_TRANSITIONS.keys() - found.receiver_used == set()


def test_while_both_sides_live_a_batch_ends_moved_or_where_it_was(found):
    ended = [
        w for w in found.worlds if w.both_live and w.sender in SENDER_END_STATES and w.receiver in RECEIVER_END_STATES
    ]
    assert {(w.sender, w.receiver) for w in ended} == {(S.RELEASED, R.OWNED), (S.KEPT, R.DROPPED)}


@pytest.mark.parametrize(
    ("survivor", "end", "owner"),
    [
        (S.OFFERED, S.KEPT, Owner.SENDER),
        (S.SENDING, S.KEPT, Owner.SENDER),
        (S.COMMITTING, S.RECLAIMED, Owner.SENDER),
    ],
)
def test_a_sender_keeps_a_batch_that_a_dead_receiver_has_not_confirmed(survivor, end, owner):
    step = SENDER_TRANSITIONS[survivor, SenderEvent.PEER_DEAD]
    assert (step.state, sender_view(step.state)) == (end, owner)
    assert SenderAction.RELEASE not in step.actions


@pytest.mark.parametrize("survivor", [R.AWAITING, R.RECEIVING, R.STORED])
def test_a_receiver_drops_a_batch_that_a_dead_sender_has_not_committed(survivor):
    step = RECEIVER_TRANSITIONS[survivor, ReceiverEvent.PEER_DEAD]
    assert (step.state, receiver_view(step.state)) == (R.DROPPED, Owner.SENDER)
    assert (ReceiverAction.FREE in step.actions) == (survivor is not R.AWAITING)


def test_a_timeout_never_resolves_doubt():
    assert SENDER_TRANSITIONS[S.COMMITTING, SenderEvent.GIVE_UP] == SenderStep(S.COMMITTING)
    assert RECEIVER_TRANSITIONS[R.STORED, ReceiverEvent.GIVE_UP] == ReceiverStep(R.STORED)
    assert sender_view(S.COMMITTING) is receiver_view(R.STORED) is Owner.IN_DOUBT


def test_sides_that_have_ended_agree_on_the_owner(found):
    views = {
        (sender_view(world.sender), receiver_view(world.receiver))
        for world in found.worlds
        if world.both_live and world.sender in SENDER_END_STATES and world.receiver in RECEIVER_END_STATES
    }
    assert views == {(Owner.SENDER, Owner.SENDER), (Owner.RECEIVER, Owner.RECEIVER)}


@pytest.mark.parametrize(
    ("key", "step"),
    [
        ((S.SENDING, SenderEvent.ACCEPT), SenderStep(S.COMMITTING, (SenderAction.SEND_COMMIT,))),
        ((S.SENDING, SenderEvent.STORED), SenderStep(S.RELEASED, (SenderAction.SEND_COMMIT, SenderAction.RELEASE))),
        ((S.COMMITTING, SenderEvent.GIVE_UP), SenderStep(S.KEPT, (SenderAction.SEND_ABORT,))),
        ((S.COMMITTING, SenderEvent.PEER_DEAD), SenderStep(S.RELEASED, (SenderAction.RELEASE,))),
        ((S.SENDING, SenderEvent.GIVE_UP), SenderStep(S.KEPT)),
        ((S.RELEASED, SenderEvent.COMMITTED), SenderStep(S.RELEASED, (SenderAction.RELEASE,))),
    ],
)
def test_the_exploration_sees_an_unsafe_sender(key, step):
    assert explore({**SENDER_TRANSITIONS, key: step}, RECEIVER_TRANSITIONS).faults != []


@pytest.mark.parametrize(
    ("key", "step"),
    [
        ((R.STORED, ReceiverEvent.GIVE_UP), ReceiverStep(R.DROPPED, (ReceiverAction.FREE, ReceiverAction.SEND_ABORT))),
        ((R.STORED, ReceiverEvent.GIVE_UP), ReceiverStep(R.OWNED, (ReceiverAction.ADOPT,))),
        ((R.RECEIVING, ReceiverEvent.ARRIVED), ReceiverStep(R.OWNED, (ReceiverAction.ADOPT,))),
        ((R.STORED, ReceiverEvent.PEER_DEAD), ReceiverStep(R.OWNED, (ReceiverAction.ADOPT,))),
        ((R.RECEIVING, ReceiverEvent.ABORT), ReceiverStep(R.DROPPED)),
        ((R.OWNED, ReceiverEvent.COMMIT), ReceiverStep(R.OWNED, (ReceiverAction.ADOPT,))),
    ],
)
def test_the_exploration_sees_an_unsafe_receiver(key, step):
    assert explore(SENDER_TRANSITIONS, {**RECEIVER_TRANSITIONS, key: step}).faults != []
