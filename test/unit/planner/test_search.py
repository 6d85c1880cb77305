"""The search: what it may choose, what it never chooses, and how equal plans are told apart."""

from __future__ import annotations

import made_profiles as made
import pytest

from sgl_batch.planner.candidate import DEVICE, EXCLUSIVE, INCLUSIVE, STREAMED, Candidate, flags_of
from sgl_batch.planner.candidates import Allowed, kv_forms
from sgl_batch.planner.cost_model import fit
from sgl_batch.planner.followed_run import Room
from sgl_batch.planner.model_layers import DENSE
from sgl_batch.planner.search import MemoryMap, search
from sgl_batch.planner.workload import parse_workload

RATES = {"disk": 2e9, "copy": 1e8}


def memory_of(candidate: Candidate) -> MemoryMap:
    """A byte for each row of the groups; groups of more than 256 sequences do not fit."""
    uses = {"working memory": candidate.b_moe_prefill + candidate.b_moe_decode}
    lacks = "too large" if candidate.b_moe_decode > 256 else ""
    return MemoryMap(phases={"prefill": uses}, room=Room(device=100_000, store=100_000), lacks=lacks)


def found(workload="128:32x512", kind="moe", memory=memory_of, quick=False, **allowed):
    layers = made.layers(kind)
    costs = fit(made.profile(kind, rates=RATES), layers)
    return search(parse_workload(workload), costs, layers, Allowed(**{"cores": 4, **allowed}), memory, quick=quick)


def test_the_best_plan_has_the_least_predicted_time_among_those_that_fit():
    outcome = found()
    best, times = outcome.ranked[0], [one.prediction.seconds for one in outcome.ranked]
    assert best.candidate.b_moe_decode == 256
    assert best.prediction.seconds <= min(times) * 1.005


def test_of_equal_plans_the_one_with_less_memory_is_taken():
    outcome = found("128:64x8")
    assert outcome.ranked[0].candidate.b_moe_decode == 8
    near = [one for one in outcome.ranked if one.prediction.seconds < outcome.ranked[0].prediction.seconds]
    assert all(one.memory.taken >= outcome.ranked[0].memory.taken for one in near)


def only_many_sub_batches(candidate: Candidate) -> MemoryMap:
    """Room for nothing but four sub-batches of 64, between which two buffers of KV leave gaps in the copies."""
    lacks = "" if (candidate.b_attn_decode, candidate.b_moe_decode) == (64, 256) else "another size"
    return MemoryMap(phases={}, room=Room(device=100_000, store=100_000), lacks=lacks)


def test_a_mechanism_that_is_not_built_is_never_chosen():
    layers = made.layers()
    costs = fit(made.profile(rates={"copy": 2e10}), layers)
    allowed = Allowed(kv=(STREAMED,), cores=0)
    outcome = search(parse_workload("1024:64x256"), costs, layers, allowed, only_many_sub_batches)
    assert outcome.not_implemented
    assert all(one.candidate.is_implemented for one in outcome.ranked)
    assert not any(one.candidate.is_implemented for one in outcome.not_implemented)
    assert outcome.not_implemented[0].prediction.seconds < outcome.ranked[0].prediction.seconds


def test_two_groups_by_turns_are_no_faster_than_their_copies():
    assert found("128:16x128", kv=(STREAMED,), cores=0).not_implemented == []


def test_on_a_cpu_interleaved_groups_would_gain_nothing():
    assert found("128:16x32", kv=(STREAMED,), cores=4).not_implemented == []


def test_where_nothing_fits_the_reason_is_given():
    outcome = found(memory=lambda _: MemoryMap(phases={}, room=Room(device=0), lacks="too little memory"))
    assert (outcome.ranked, outcome.lacks) == ([], "too little memory")


def test_streamed_weights_want_large_groups():
    outcome = found("128:64x256", weights=("streamed",))
    assert outcome.ranked[0].candidate.b_moe_decode >= 128
    assert outcome.ranked[0].prediction.parts["weights"] > 0


def test_kv_on_the_device_is_faster_than_streamed_where_it_fits():
    assert found("128:64x64", kv=(DEVICE, INCLUSIVE, STREAMED)).ranked[0].candidate.kv == DEVICE


def test_a_dense_model_may_accumulate_or_not():
    assert {one.candidate.accumulate for one in found("128:8x32", kind=DENSE).ranked} == {None, True, False}


@pytest.mark.parametrize(
    ("store", "mode", "forms"),
    [
        (0, "auto", (DEVICE,)),
        (1, "auto", (INCLUSIVE, EXCLUSIVE, STREAMED)),
        (1, "exclusive", (EXCLUSIVE,)),
    ],
)
def test_a_store_gives_its_forms_of_kv(store, mode, forms):
    assert kv_forms(store_bytes=store, mode=mode) == forms


def test_a_place_of_decode_kv_that_was_asked_for_leaves_the_forms_of_that_place():
    assert kv_forms(store_bytes=1, mode="auto", decode_kv="resident") == (INCLUSIVE, EXCLUSIVE)
    assert kv_forms(store_bytes=1, mode="inclusive", decode_kv="streamed") == (STREAMED,)


@pytest.mark.parametrize(
    "pinned",
    [
        {"b_attn_prefill": 700},
        {"b_moe_prefill": 100},
        {"b_attn_decode": 100},
        {"b_moe_decode": 5},
        {"accumulate": False},
        {"b_attn_prefill": 300, "b_moe_prefill": 3000, "b_attn_decode": 7, "b_moe_decode": 9, "accumulate": True},
    ],
)
@pytest.mark.parametrize("quick", [True, False])
def test_every_candidate_agrees_with_what_is_pinned(pinned, quick):
    ranked = found("64:16x64", pinned=pinned, quick=quick).ranked
    assert ranked
    for planned in ranked:
        candidate = planned.candidate
        assert {name: getattr(candidate, name) for name in pinned} == pinned
        assert candidate.b_attn_prefill <= candidate.b_moe_prefill
        assert candidate.b_attn_decode <= candidate.b_moe_decode


def test_a_pinned_sub_batch_of_0_is_the_engines_own():
    assert {one.candidate.b_attn_decode for one in found("64:16x600", pinned={"b_attn_decode": 0}).ranked} == {
        *(8, 16, 32, 64, 128, 256)
    }


def test_no_group_is_larger_than_what_may_run():
    assert max(one.candidate.b_moe_decode for one in found("64:16x600", most_running=100).ranked) == 100


@pytest.mark.parametrize("kv", [(DEVICE,), (INCLUSIVE, EXCLUSIVE, STREAMED)])
def test_a_quick_search_tries_fewer_candidates_and_finds_as_fast_a_plan(kv):
    thorough, quick = (found("96:24x200,32:300x40", kv=kv, quick=one) for one in (False, True))
    assert quick.tried < thorough.tried / 2
    assert quick.ranked[0].prediction.seconds <= 1.01 * thorough.ranked[0].prediction.seconds


def test_with_unequal_outputs_a_short_interval_may_be_chosen():
    unequal = ",".join(["32:6x13,32:300x3"] * 6)
    best = found(unequal, pinned={"b_moe_decode": 16}, intervals=True).ranked[0]
    plain = found(unequal, pinned={"b_moe_decode": 16}).ranked[0]
    assert best.candidate.boundary_tokens == 32
    assert best.prediction.seconds < 0.95 * plain.prediction.seconds
    kept = found(unequal, pinned={"b_moe_decode": 16, "boundary_tokens": 64, "ready_ahead": 0.5}, intervals=True)
    assert kept.ranked[0].candidate == plain.candidate


def test_a_candidate_is_flags_of_run():
    one = Candidate(b_attn_prefill=1, b_moe_prefill=2, b_attn_decode=3, b_moe_decode=4, accumulate=False, kv=EXCLUSIVE)
    assert flags_of(one.settings)[6:] == [
        "--b-moe-decode",
        "4",
        "--no-accumulate",
        "--decode-kv",
        "resident",
        "--kv-store-mode",
        "exclusive",
    ]
