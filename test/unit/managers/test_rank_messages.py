"""Messages between ranks keep all that decisions read."""

from __future__ import annotations

import dataclasses

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st
from rank_builders import PLAN, in_set, running
from rank_builders import rank as a_rank
from sequence_builders import sequence

from sgl_batch.core.early_copies import HeldCopy
from sgl_batch.core.exclusive import TierCapacity
from sgl_batch.core.move_costs import MoveRates
from sgl_batch.core.page_boundary import State
from sgl_batch.core.rank_agreement import decide_group
from sgl_batch.core.rank_moves import Migration
from sgl_batch.core.rank_state import Movable, RankState
from sgl_batch.core.sequence import SequenceState, Status
from sgl_batch.core.store_lease import StoreUse
from sgl_batch.managers import rank_messages
from sgl_batch.managers.rank_messages import (
    BoundaryActions,
    Message,
    StateMessage,
    actions_for,
    copies_of,
    message_of,
    moves_of,
    state_of,
)


def test_a_long_queue_is_sent_up_to_a_limit(monkeypatch):
    monkeypatch.setattr(rank_messages, "MOST_QUEUED", 3)
    message = message_of(a_rank(queued=[sequence(arrival) for arrival in range(5)]))
    assert [row.sequence_id for row in message.queued] == ["s0", "s1", "s2"]


@st.composite
def sequences(draw, status: Status, first: int) -> list[SequenceState]:
    numbers = st.tuples(
        st.integers(1, 300),
        st.integers(0, 50),
        st.sampled_from([None, "g", "h"]),
        st.integers(0, 99),
        st.integers(0, 1 << 50),
    )
    drawn = draw(st.lists(numbers))
    return [
        SequenceState(
            sequence_id=f"s{first + i}",
            arrival=first + i,
            prompt_tokens=prompt,
            max_new_tokens=new,
            prompt_group=group,
            choice=i,
            status=status,
            expected_tokens=expected,
            waits_since=waits,
        )
        for i, (prompt, new, group, expected, waits) in enumerate(drawn)
    ]


@st.composite
def rank_states(draw) -> RankState:
    waiting, runners = draw(sequences(Status.READY, 100)), draw(sequences(Status.RUNNING, 200))

    def movables(of: list[SequenceState]) -> list[Movable]:
        chosen = [item for item in of if draw(st.booleans())]
        some = st.integers(0, 9)
        return [
            Movable(
                sequence=s,
                tokens=draw(some),
                pages=draw(some),
                gap=draw(some),
                leased=draw(some),
                replicable=draw(st.booleans()),
            )
            for s in chosen
        ]

    total, overflow = draw(st.integers(0, 100)), draw(st.integers(0, 50))
    largest = draw(st.integers(0, total))
    grows = draw(st.booleans())
    gap = draw(st.integers(0, total - largest)) if grows else 0
    limit = total + max(0, overflow - largest) - gap
    capacity = st.builds(
        TierCapacity, device=st.none() | st.integers(0, 99), store=st.integers(0, 99), to_store=st.booleans()
    )
    drawn, is_account = draw(st.none() | capacity), draw(st.booleans())
    leased = overflow if drawn is not None else total
    store = StoreUse(total=1000, leased=leased, kept=leased, is_account=is_account and drawn is None)
    return RankState(
        state=State(
            queued=draw(sequences(Status.QUEUED, 0)),
            ready=waiting,
            running=len(runners),
            steps=draw(st.integers(0, 64)),
            request_slots=draw(st.integers(0, 64)),
            free_request_slots=draw(st.integers(0, 64)),
            filling=draw(st.booleans()),
            returning=draw(st.integers(0, 9)),
        ),
        total_pages=total,
        free_pages=draw(st.integers(0, limit - largest)),
        overflow_pages=overflow,
        largest=largest,
        grows=grows,
        largest_gap=gap,
        has_waiting=grows and draw(st.booleans()),
        capacity=drawn,
        ready=movables(waiting),
        running=movables(runners),
        takes_replicas=draw(st.booleans()),
        store=store,
        lacking=draw(st.integers(0, 9)),
        device_room=draw(st.integers(0, 99)),
    )


def over_the_wire(message: Message) -> Message:
    return msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=Message)


COPIES = st.builds(HeldCopy, sequence_id=st.text(), source=st.integers(0, 3), arrived=st.booleans())


@settings(deadline=None)
@given(state=rank_states(), held=st.lists(COPIES), sends=st.booleans(), sent=st.floats(0, 1e6))
def test_a_state_is_the_same_after_the_wire(state, held, sends, sent):
    queued = [Movable(sequence=sequence, tokens=0, pages=3, gap=1) for sequence in state.state.queued[::2]]
    rates = MoveRates(sent_per_s=sent, computed_per_s=7.5)
    state = dataclasses.replace(state, held=tuple(held), sends_pages=sends, queued=tuple(queued), rates=rates)
    message = over_the_wire(message_of(state))
    assert isinstance(message, StateMessage)
    assert state_of(message, 0) == state


def test_a_partitioned_rank_is_the_same_after_the_wire():
    state = in_set(a_rank(runs=running(2)), {0, 2}, 3)
    assert state_of(over_the_wire(message_of(state)), 0) == state


@settings(deadline=None)
@given(
    states=st.lists(rank_states(), min_size=2, max_size=4),
    migration=st.sampled_from(Migration),
    page_size=st.sampled_from([1, PLAN.page_size]),
)
def test_actions_have_all_that_was_decided(states, migration, page_size):
    states = [dataclasses.replace(state, sends_pages=True) for state in states]
    decision = decide_group(states, dataclasses.replace(PLAN, page_size=page_size), migration)
    for rank, (*_, action) in enumerate(decision.actions):
        own = over_the_wire(actions_for(decision, rank))
        assert isinstance(own, BoundaryActions)
        assert (own.prefill, own.busy, own.expert_calls) == (decision.prefill, decision.busy, decision.expert_calls)
        assert moves_of(own) == list(decision.moves)
        assert copies_of(own) == list(decision.copies)
        units = [[member.sequence_id for member in unit.members] for unit in getattr(action, "units", ())]
        assert own.units == units
        lease = decision.leases[rank]
        assert own.lease == (lease.blocks, lease.admits)
        assert own.refill == [s.sequence_id for s in getattr(action, "sequences", ())]
