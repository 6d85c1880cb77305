"""The actions of each KV policy with a store at a boundary, in order."""

from __future__ import annotations

import dataclasses

import pytest
from sequence_builders import plan, sequence

from sgl_batch.core.actions import (
    BeginInterval,
    Evict,
    Extend,
    Idle,
    Join,
    Prefill,
    Refill,
    Restore,
    StreamDecode,
    Suspend,
    Sync,
)
from sgl_batch.core.admission import Admission
from sgl_batch.core.decide import decide
from sgl_batch.core.decode_streaming import StreamingChoice
from sgl_batch.core.exclusive import TierCapacity
from sgl_batch.core.kv_state import Interval, KVState
from sgl_batch.core.page_boundary import State
from sgl_batch.core.page_ledger import PageLedger
from sgl_batch.core.rank_state import Movable
from sgl_batch.core.sequence import SequenceState, Status
from sgl_batch.core.store_policies import Exclusive, Inclusive, Streamed

PLAN = plan(b_moe=4, boundary_tokens=8, page_size=8)


def waits(arrival: int, **fields) -> SequenceState:
    made = sequence(arrival, prompt=8, new=100, status=Status.SUSPENDED)
    made.generated_tokens = 1
    return dataclasses.replace(made, **fields)


def runs(arrival: int, generated: int = 1) -> SequenceState:
    return dataclasses.replace(waits(arrival), status=Status.RUNNING, generated_tokens=generated)


def rank(running=(), ready=(), *, pages=50, held=(), returning=0, **kv_fields) -> tuple[State, KVState]:
    """Return a rank at a boundary. `held`: device pages by sequence; 3 for runners by default."""
    device = PageLedger(pages, 8)
    for one, number in {**{one.sequence_id: 3 for one in running}, **dict(held)}.items():
        device.reserve(one, number)
    state = State(
        queued=(),
        ready=list(ready),
        running=len(running),
        steps=8,
        request_slots=64,
        free_request_slots=64,
        filling=False,
        returning=returning,
    )
    kv = KVState(
        device=device,
        admission=kv_fields.pop("admission", PageLedger(1000, 8)),
        runners=lambda: list(running),
        estimate_shared=lambda _: None,
        **kv_fields,
    )
    return state, kv


# Inclusive.


def test_a_boundary_with_nothing_to_do_completes_copies_and_idles():
    assert Inclusive().at_boundary(*rank(), PLAN) == (Sync(wait=True), Idle())


def test_runners_are_extended_and_waiting_sequences_restored_while_steps_run():
    one, other = runs(0), waits(1)
    actions = Inclusive().at_boundary(*rank([one], [other]), PLAN)
    assert actions == (Sync(), Extend(pages=((one, 3),)), Restore(pages=((other, 3),)), BeginInterval())


def test_a_rank_without_runners_waits_for_restored_sequences_unless_other_ranks_run():
    state, kv = rank([], [waits(1)])
    assert Inclusive().at_boundary(state, kv, PLAN)[-2:] == (Join(wait=True), BeginInterval())
    assert Join(wait=True) not in Inclusive().at_boundary(state, kv, PLAN, others_run=True)


def test_a_victim_leaves_before_others_are_extended():
    young, old = runs(0), runs(1, generated=40)
    actions = Inclusive().at_boundary(*rank([young, old], pages=9, held={"s1": 6}), PLAN)
    assert [type(action) for action in actions] == [Sync, Suspend, Extend, BeginInterval]
    assert actions[1].sequences == (old,)


# Exclusive.


def test_prompts_stay_on_the_device_only_while_no_sequence_waits_in_the_store():
    unit = (Admission(leader=sequence(5, prompt=8, new=20)),)
    state, kv = rank(store_free=100)
    assert Exclusive().prefill(unit, state, kv, PLAN) == Prefill(units=unit, on_device=(3,))
    state, kv = rank([], [waits(1)], store_free=100)
    assert Exclusive().prefill(unit, state, kv, PLAN) == Prefill(units=unit)


def test_prompts_for_the_device_alone_wait_for_the_sequences_in_the_store():
    policy, unit = Exclusive(to_store=False), (Admission(leader=sequence(5, prompt=8, new=20)),)
    state, kv = rank(store_free=100)
    assert policy.capacity(state, kv, PLAN) == TierCapacity(device=50, store=100, to_store=False)
    assert policy.prefill(unit, state, kv, PLAN) == Prefill(units=unit, on_device=(3,))
    queued = rank([], [waits(1)], store_free=100)
    assert policy.capacity(*queued, PLAN) == TierCapacity(device=None, store=100, to_store=False)
    state, kv = dataclasses.replace(queued[0], queued=[unit[0].leader]), queued[1]
    assert [type(action) for action in decide(state, kv, PLAN, policy)] == [Sync, Restore, Join, BeginInterval]
    assert [type(action) for action in decide(state, kv, PLAN, Exclusive())] == [Prefill]


def test_a_sequence_on_the_device_joins_at_once_and_one_in_the_store_later():
    stayed, away = waits(1), waits(2)
    actions = Exclusive().at_boundary(*rank([], [stayed, away], held={"s1": 2}, store_free=100), PLAN)
    assert actions == (
        Sync(),
        Extend(pages=((stayed, 3),)),
        Refill(sequences=(stayed,)),
        Restore(pages=((away, 3),)),
        BeginInterval(),
    )


def test_prompts_that_wait_on_a_device_without_room_go_to_the_store():
    young, stayed = runs(0), waits(1)
    actions = Exclusive().at_boundary(*rank([young], [stayed], pages=4, held={"s0": 2, "s1": 2}, store_free=9), PLAN)
    assert Evict(sequences=(stayed,)) in actions


def test_sequences_leave_for_the_store_after_those_on_their_way_have_freed_its_pages():
    young, old = runs(0), runs(1, generated=40)
    tight = {"pages": 12, "held": {"s1": 6, "s9": 3}, "returning": 1}
    assert Exclusive().at_boundary(*rank([young, old], **tight, store_free=5), PLAN) == (Join(wait=True),)
    actions = Exclusive().at_boundary(*rank([young, old], **tight, store_free=6), PLAN)
    assert actions[:2] == (Sync(), Suspend(sequences=(old,), why="pages of the device lack"))


def test_runners_may_migrate_as_far_as_the_store_has_room_for_them():
    items = [Movable(sequence=runs(i), tokens=tokens, pages=9) for i, tokens in enumerate((30, 8, 16))]
    waiting = Movable(sequence=waits(7), tokens=8, pages=9)
    on_device = Movable(sequence=waits(8), tokens=8, pages=9)
    _, kv = rank(store_free=3, held={"s8": 2})
    ready, running = Exclusive().movable([waiting, on_device], items, kv, PLAN)
    assert ready == [waiting]
    assert [item.tokens for item in running] == [8, 16]


# Streamed.


def test_streamed_decode_refills_up_to_the_limit_of_the_plan():
    ready = [waits(i) for i in range(1, 9)]
    actions = Streamed().at_boundary(*rank([runs(0)], ready, streams=True), PLAN)
    assert actions == (Sync(), Refill(sequences=tuple(ready[:3])), BeginInterval())


def test_choices_compute_their_last_prompt_token_before_others_join():
    choice = waits(1, status=Status.QUEUED, generated_tokens=0)
    actions = Streamed().at_boundary(*rank([], [choice, waits(2)], choices=[choice], streams=True), PLAN)
    assert actions == (Sync(), Restore(pages=((choice, 3),)), Join(wait=True))


def measured(number: int, rows: int) -> Interval:
    return Interval(number=number, alive=9, rows=rows, seconds=1.0)


def test_the_faster_form_of_decode_kv_is_taken_when_both_were_measured():
    """Nine sequences do not fit: streaming is tried, then resident steps, then the faster form stays."""
    admission = PageLedger(1000, 8)
    admission.reserve("all", 99)
    runners, ready = [runs(i) for i in range(4)], [waits(i) for i in range(4, 9)]
    policy = Streamed(StreamingChoice())

    def at_boundary(*, streams: bool, interval: Interval):
        return policy.at_boundary(*rank(runners, ready, admission=admission, streams=streams, interval=interval), PLAN)

    first = at_boundary(streams=False, interval=measured(1, 10))
    assert [type(action) for action in first] == [Suspend, StreamDecode]
    assert first[1].on
    assert BeginInterval() in at_boundary(streams=True, interval=Interval(number=2))
    assert StreamDecode(on=False) not in at_boundary(streams=True, interval=measured(3, 90))
    assert at_boundary(streams=True, interval=measured(4, 1))[-1] == StreamDecode(on=False)


def test_the_form_of_decode_kv_changes_only_when_no_sequence_is_on_its_way():
    admission = PageLedger(1000, 8)
    admission.reserve("all", 99)
    state, kv = rank([runs(0)], [waits(1)], admission=admission, returning=1)
    assert Streamed(StreamingChoice()).at_boundary(state, kv, PLAN) == (Join(wait=True),)


@pytest.mark.parametrize("policy", [Inclusive, Streamed])
def test_any_waiting_and_running_sequence_may_leave_an_inclusive_store(policy):
    item = Movable(sequence=runs(0), tokens=9, pages=9)
    _, kv = rank()
    assert policy().movable([item], [item], kv, PLAN) == ([item], [item])
