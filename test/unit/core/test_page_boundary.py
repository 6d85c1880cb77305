"""What comes next: prefill, refill or decode; single decisions, and whole schedules of virtual sequences."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sequence_builders import choices, plan, sequence
from virtual_schedule import Request, VirtualSchedule

from sgl_batch.core.actions import BeginInterval, Idle, Prefill, Refill, Step
from sgl_batch.core.admission import Admission
from sgl_batch.core.decide import decide
from sgl_batch.core.kv_policy import DeviceOnly
from sgl_batch.core.kv_state import KVState
from sgl_batch.core.page_boundary import State, boundary_due
from sgl_batch.core.page_ledger import PageLedger

EMPTY = State(queued=(), ready=(), running=0, steps=0, request_slots=64, free_request_slots=64, filling=False)
PLAN = plan(b_moe=8, boundary_tokens=4, refill_watermark=0.75, ready_target=12)


def sequences(count: int, first: int = 0) -> tuple:
    return tuple(sequence(first + i) for i in range(count))


def state(**fields) -> State:
    return dataclasses.replace(EMPTY, **fields)


def actions(pages: int = 1000, plan=PLAN, **fields):
    ledger = PageLedger(pages, 8)
    kv = KVState(device=ledger, admission=ledger, runners=tuple, estimate_shared=lambda _: None)
    return decide(state(**fields), kv, plan, DeviceOnly())


def refilled(*sequences):
    return (Refill(sequences=sequences), BeginInterval(), Step())


GOES_ON = (BeginInterval(), Step())


# When a boundary is due.


@pytest.mark.parametrize(("steps", "due"), [(0, False), (3, False), (4, True), (5, True)])
def test_a_boundary_is_due_after_boundary_tokens_steps(steps, due):
    assert boundary_due(state(running=8, steps=steps), PLAN) is due


def test_a_boundary_is_due_when_no_sequence_runs():
    assert boundary_due(EMPTY, PLAN)


@pytest.mark.parametrize(
    ("running", "queued", "ready", "due"),
    [(4, 4, 0, True), (4, 0, 4, True), (4, 2, 2, True), (4, 2, 1, False), (5, 9, 9, False), (1, 0, 0, False)],
)
def test_a_boundary_comes_at_once_if_waiting_sequences_could_double_a_small_group(running, queued, ready, due):
    waiting = state(running=running, steps=1, queued=sequences(queued), ready=sequences(ready, first=50))
    assert boundary_due(waiting, PLAN) is due


def test_a_small_group_waits_for_its_boundary_if_nothing_has_changed():
    waiting = state(running=2, steps=1, queued=sequences(20), changed=False)
    assert not boundary_due(waiting, PLAN)
    assert boundary_due(dataclasses.replace(waiting, steps=4), PLAN)
    assert boundary_due(dataclasses.replace(waiting, urgent=True), PLAN), "a boundary is asked for"
    assert boundary_due(dataclasses.replace(waiting, running=0), PLAN)


# What is done at a boundary.


def test_between_boundaries_the_group_decodes():
    assert actions(running=8, steps=1, queued=sequences(20)) == (Step(),)


def test_nothing_to_do_is_idle():
    assert actions() == (Idle(),)


def test_a_boundary_with_nothing_to_change_decodes_on():
    assert actions(running=8, steps=4) == GOES_ON


def test_a_full_group_is_not_refilled():
    assert actions(running=8, steps=4, ready=sequences(3)) == GOES_ON


def test_a_refill_takes_the_earliest_arrivals_up_to_the_room():
    ready = tuple(reversed(sequences(5)))
    assert actions(running=6, steps=4, ready=ready) == refilled(ready[4], ready[3])


@pytest.mark.parametrize(("running", "ready", "prefills"), [(5, 0, True), (4, 1, True), (6, 0, False), (3, 3, False)])
def test_prefill_begins_when_running_and_ready_fall_below_the_watermark(running, ready, prefills):
    queued = sequences(3, first=20)
    done = actions(running=running, steps=4, ready=sequences(ready), queued=queued)[0]
    assert isinstance(done, Prefill) is prefills
    if prefills:
        assert [unit.leader for unit in done.units] == list(queued)


@pytest.mark.parametrize(("resident", "prefills"), [(6, True), (11, True), (12, False)])
def test_prefill_once_begun_goes_on_until_enough_are_ready(resident, prefills):
    done = actions(ready=sequences(resident), queued=sequences(3, first=20), filling=True)[0]
    assert isinstance(done, Prefill) is prefills


def test_a_watermark_of_zero_prefills_when_no_sequence_is_left():
    never = plan(refill_watermark=0.0)
    assert isinstance(actions(plan=never, queued=sequences(1))[0], Prefill)
    assert actions(plan=never, queued=sequences(1), running=1, steps=4) == GOES_ON


def test_ready_sequences_join_if_the_head_of_the_queue_lacks_pages():
    done = actions(pages=1, running=1, steps=4, ready=sequences(2), queued=sequences(3, first=20))
    assert done == refilled(*sequences(2))


def test_choices_of_a_request_are_prefilled_as_one_unit():
    group = choices(3)
    assert actions(queued=group) == (Prefill(units=(Admission(leader=group[0], followers=tuple(group[1:])),)),)


def test_a_request_with_more_choices_than_request_slots_is_cut_to_them():
    (done,) = actions(queued=choices(5), request_slots=2, free_request_slots=2)
    assert [unit.members for unit in done.units] == [tuple(choices(2))]


# Whole schedules.

# Each request: decisions since the one before, prompt, most output, percentage of it that is generated, choices.
requests = st.tuples(
    st.integers(0, 12),
    st.one_of(st.integers(1, 40), st.integers(1, 200)),
    st.integers(1, 40),
    st.integers(1, 100),
    st.sampled_from([1, 1, 1, 2, 5]),
)


def build(drawn) -> list[Request]:
    built, at = [], 0
    for gap, prompt, most, percent, count in drawn:
        at += gap
        output = max(1, most * percent // 100)
        built.append(Request(at=at, prompt=prompt, max_new=most, output=output, choices=count))
    return built


@st.composite
def plans(draw):
    b_moe, ahead = draw(st.integers(1, 12)), draw(st.integers(0, 12))
    b_moe_prefill, page_size = draw(st.integers(1, 120)), draw(st.sampled_from([1, 8, 64]))
    mixes = page_size <= b_moe_prefill and draw(st.booleans())
    return plan(
        b_moe_prefill=b_moe_prefill,
        b_moe=b_moe,
        boundary_tokens=draw(st.integers(1, 16)),
        refill_watermark=draw(st.sampled_from([0.0, 0.5, 0.75, 1.0])),
        ready_target=b_moe + ahead,
        page_size=page_size,
        mix_prefill=draw(st.integers(page_size, b_moe_prefill)) if mixes else 0,
    )


@settings(max_examples=120, deadline=None)
@given(
    drawn=st.lists(requests, min_size=1, max_size=25),
    plan=plans(),
    tokens=st.integers(64, 2000),
    spare_request_slots=st.integers(0, 12),
    urgent_every=st.sampled_from([0, 1, 3]),
)
def test_every_schedule_finishes_every_sequence_in_fair_order(drawn, plan, tokens, spare_request_slots, urgent_every):
    todo = build(drawn)
    pages, request_slots = tokens // plan.page_size, plan.ready_target + spare_request_slots
    schedule = VirtualSchedule(todo, plan, pages=pages, request_slots=request_slots, urgent_every=urgent_every)
    log = schedule.run(most_decisions=5000)
    all_sequences = range(sum(request.choices for request in todo))
    assert sorted(log.finished + log.refused) == list(all_sequences)
    assert log.most_running <= plan.decode.b_moe
    assert log.refilled == sorted(log.refilled), "no sequence is overtaken on the way into the decode group"


@settings(max_examples=60, deadline=None)
@given(drawn=st.lists(requests, min_size=1, max_size=25), plan=plans(), tokens=st.integers(64, 2000))
def test_requests_of_one_choice_are_prefilled_in_order_of_arrival(drawn, plan, tokens):
    todo = [dataclasses.replace(request, choices=1) for request in build(drawn)]
    schedule = VirtualSchedule(todo, plan, pages=tokens // plan.page_size, request_slots=plan.ready_target)
    log = schedule.run(most_decisions=5000)
    assert log.prefilled == [i for i in range(len(todo)) if i not in log.refused]


def test_a_long_job_keeps_the_group_full_until_its_tail():
    todo = [
        Request(at=0, prompt=20 + i % 30, max_new=40, output=20 + i % 21, choices=1 + (i % 10 == 0))
        for i in range(1500)
    ]
    job_plan = plan(b_moe_prefill=256, b_moe=16, boundary_tokens=8, ready_target=24, page_size=8)
    log = VirtualSchedule(todo, job_plan, pages=1000, request_slots=32).run(most_decisions=10_000)
    generated = sum((request.output - 1) * request.choices for request in todo)
    assert len(log.finished) == 1650
    assert log.decisions > 3000
    assert generated / log.decisions > 0.75 * 16, "decode steps and prefills together use most of the group"
