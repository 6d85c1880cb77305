"""What a step computes: decode rows, and with them chunks of prompts."""

from __future__ import annotations

import dataclasses

import pytest
from sequence_builders import choices, plan, sequence

from sgl_batch.config import BatchConfig, ForwardConfig, ScheduleConfig
from sgl_batch.core.actions import Chunk, Prefill, Step
from sgl_batch.core.compose import DecodeOnly, MixPrefill, StepView, step_policy
from sgl_batch.core.decide import decide
from sgl_batch.core.kv_policy import DeviceOnly
from sgl_batch.core.kv_state import KVState
from sgl_batch.core.page_boundary import State
from sgl_batch.core.page_ledger import PageLedger
from sgl_batch.core.rank_agreement import decide_group
from sgl_batch.core.rank_moves import Migration
from sgl_batch.core.rank_state import RankState
from sgl_batch.core.sequence import SequenceState, Status
from sgl_batch.core.store_policies import Exclusive
from sgl_batch.errors import ConfigError


def state(*queued: SequenceState, running: int = 4, begun: SequenceState | None = None, **changes: object) -> State:
    counts = {"steps": 1, "request_slots": 16, "free_request_slots": 8, "filling": False, "changed": False, **changes}
    return State(queued=queued, ready=(), running=running, begun=begun, **counts)


def kv(pages: int = 100) -> KVState:
    ledger = PageLedger(pages, 8)
    return KVState(device=ledger, admission=ledger, runners=tuple, estimate_shared=lambda _: None)


def chunks_of(at: State, *, mix: int, pages: int = 100) -> list[tuple[str, int, int]]:
    """Return the chunks of a decode step: sequence, start, tokens."""
    step = MixPrefill().compose(StepView(state=at, kv=kv(pages), plan=plan(mix_prefill=mix)), DeviceOnly())
    return [(chunk.sequence.sequence_id, chunk.start, chunk.tokens) for chunk in step.prefill]


def computed(arrival: int, *, prompt: int, tokens: int) -> SequenceState:
    """Return a sequence with so many computed tokens of its prompt."""
    return dataclasses.replace(sequence(arrival, prompt=prompt, status=Status.PREFILLING), computed_tokens=tokens)


def test_without_mixing_a_step_is_its_decode_rows():
    assert isinstance(step_policy(plan()), DecodeOnly)
    assert decide(state(sequence(0)), kv(), plan(), DeviceOnly()) == (Step(),)


def test_a_step_takes_prompts_from_the_head_of_the_queue_and_cuts_the_last_at_a_page():
    at = state(sequence(0, prompt=10), sequence(1, prompt=50), sequence(2))
    assert chunks_of(at, mix=30) == [("s0", 0, 10), ("s1", 0, 16)]


def test_a_begun_prompt_continues_first_and_others_follow_its_end():
    begun = computed(0, prompt=30, tokens=16)
    assert chunks_of(state(sequence(1, prompt=9), begun=begun), mix=30) == [("s0", 16, 14), ("s1", 0, 9)]
    assert chunks_of(state(sequence(1), begun=begun), mix=8) == [("s0", 16, 8)]


def test_a_chunk_begins_behind_what_the_prompt_shares():
    shares = dataclasses.replace(sequence(0, prompt=40), shared_tokens=24)
    assert chunks_of(state(shares), mix=8) == [("s0", 24, 8)]


def test_a_prompt_for_one_pass_is_not_cut_and_holds_the_queue():
    whole = dataclasses.replace(sequence(0, prompt=20), in_one_pass=True)
    assert chunks_of(state(whole, sequence(1)), mix=16) == []
    assert chunks_of(state(whole, sequence(1, prompt=3)), mix=24) == [("s0", 0, 20), ("s1", 0, 3)]
    again = dataclasses.replace(sequence(0, prompt=20), generated_tokens=3)
    assert chunks_of(state(again), mix=16) == []


def test_a_prompt_of_several_choices_waits_for_a_group():
    assert chunks_of(state(*choices(3)), mix=64) == []


@pytest.mark.parametrize(("pages", "free_request_slots"), [(1, 8), (100, 0)])
def test_no_prompt_begins_without_pages_for_all_of_it_and_a_request_slot(pages, free_request_slots):
    assert chunks_of(state(sequence(0, prompt=10), free_request_slots=free_request_slots), mix=16, pages=pages) == []


def test_no_prompt_is_cut_with_an_exclusive_store():
    device, both = PageLedger(50, 8), PageLedger(50, 8, overflow_pages=50)
    stores = KVState(device=device, admission=both, runners=tuple, estimate_shared=lambda _: None, store_free=50)
    view = StepView(state=state(sequence(0, prompt=10), sequence(1, prompt=50)), kv=stores, plan=plan(mix_prefill=30))
    step = MixPrefill().compose(view, Exclusive())
    assert [(chunk.sequence.sequence_id, chunk.tokens) for chunk in step.prefill] == [("s0", 10)]
    assert step.on_device == (2,), "with the pages to run until the next boundary"


def test_a_prefill_group_computes_the_rest_of_a_begun_prompt_first():
    begun, waiting = computed(0, prompt=30, tokens=16), sequence(1, prompt=90)
    at = state(waiting, running=0, begun=begun)
    mixed = plan(mix_prefill=8)
    (action,) = decide(at, kv(), mixed, DeviceOnly())
    assert isinstance(action, Prefill)
    assert (action.rest, action.units) == (Chunk(sequence=begun, start=16, tokens=14), ()), "90 more are over 100"
    roomy = dataclasses.replace(mixed, prefill=plan(b_moe_prefill=104).prefill)
    (action,) = decide(at, kv(), roomy, DeviceOnly())
    assert [unit.leader for unit in action.units] == [waiting]


def test_a_rank_that_joins_a_prefill_ends_its_begun_prompt():
    def rank(at: State) -> RankState:
        return RankState(state=at, total_pages=100, free_pages=90)

    begun = computed(0, prompt=30, tokens=16)
    decision = decide_group(
        [rank(state(sequence(1), running=0)), rank(state(running=7, begun=begun))],
        plan(mix_prefill=8, b_moe_prefill=10),
        Migration.EVEN,
    )
    assert decision.prefill
    assert decision.actions[1][0].rest == Chunk(sequence=begun, start=16, tokens=14)
    assert decision.expert_calls == 2, "14 rows, 10 in a call"


def test_a_step_view_counts_waiting_tokens_and_free_pages():
    begun = computed(0, prompt=30, tokens=16)
    used = kv(pages=10)
    used.device.reserve("s0", 4)
    view = StepView(state=state(sequence(1), begun=begun, queued_tokens=10), kv=used, plan=plan(), in_flight=1)
    assert (view.waiting_tokens, view.free_rate, view.running, view.in_flight) == (24, 0.6, 4, 1)


@pytest.mark.parametrize(
    ("forward", "schedule", "words"),
    [
        ({"b_moe_prefill": 100}, {"mix_prefill": 101}, r"mix_prefill is 101, more than b_moe_prefill \(100\)"),
        ({"accumulate": False}, {"mix_prefill": 64}, "experts are called once for each sub-batch"),
        ({}, {"mix_prefill": 64, "overlap": "on"}, "leave out overlap or mix_prefill"),
    ],
)
def test_options_that_exclude_mixing_are_refused(forward, schedule, words):
    with pytest.raises(ConfigError, match=words):
        BatchConfig(forward=ForwardConfig(**forward), schedule=ScheduleConfig(**schedule))
