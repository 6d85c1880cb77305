"""A running plan follows what its passes took: the costs as measured, what may change, and when it pays."""

from __future__ import annotations

from dataclasses import replace

import made_profiles as made
import pytest

from sgl_batch.config import BatchConfig
from sgl_batch.planner.candidate import DEVICE, Candidate
from sgl_batch.planner.candidates import Allowed
from sgl_batch.planner.cost_model import fit
from sgl_batch.planner.followed_run import Room
from sgl_batch.planner.measured_costs import PARTS, Measured, cost_factors, predicted_parts, scaled
from sgl_batch.planner.pass_cost import STEP, PassCost
from sgl_batch.planner.refinement import LEAST_GAIN, PlanBasis, limits_of, limits_with_memory, refine
from sgl_batch.planner.search import MemoryMap
from sgl_batch.planner.workload import parse_workload

COSTS = fit(made.profile(), made.layers())
ROOM = MemoryMap(phases={"prefill": {"working": 100}}, room=Room(device=100_000))
NOW = Candidate(b_attn_prefill=1024, b_moe_prefill=4096, b_attn_decode=64, b_moe_decode=64)
PASSES = Measured(
    steps=500, rows=500 * 60, looked_at=500 * 60 * 90, groups=20, tokens=20 * 3800, prompt=64, part_s={"experts": 1.0}
)
LEFT = parse_workload("64:32x900")


def refined(of, took, left):
    return refine(of, took, left, lambda: 0.0)


def basis(candidate: Candidate = NOW, memory_of=lambda _: ROOM, pinned=None, **more) -> PlanBasis:
    return PlanBasis(
        candidate=candidate,
        costs=COSTS,
        model=made.layers(),
        allowed=Allowed(cores=4, base=BatchConfig(), pinned=pinned or {}, most_running=256),
        memory=ROOM,
        memory_of=memory_of,
        workload=parse_workload("64:32x48"),
        **more,
    )


def measured(**factors: float) -> Measured:
    """What the passes take where each part takes so many times what the profile says."""
    predicted = predicted_parts(PASSES, PassCost(COSTS, made.layers(), NOW, cores=4))
    return replace(PASSES, part_s={name: predicted[name] * factors.get(name, 1.0) for name in PARTS})


def test_costs_scaled_by_the_measured_factors_predict_what_was_measured():
    took = measured(attention=1.5, experts=0.7, step=2.0, router=1.1)
    factors = cost_factors(took, predicted_parts(PASSES, PassCost(COSTS, made.layers(), NOW, cores=4)))
    assert factors == pytest.approx(
        {**dict.fromkeys(PARTS, 1.0), "attention": 1.5, "experts": 0.7, STEP: 2, "router": 1.1}
    )
    again = predicted_parts(PASSES, PassCost(scaled(COSTS, factors), made.layers(), NOW, cores=4))
    assert again == pytest.approx(took.part_s)


def test_a_part_that_hardly_counts_keeps_its_cost():
    took = measured()
    tiny = replace(took, part_s={**took.part_s, "copies": 0.001 * took.seconds})
    assert set(cost_factors(tiny, took.part_s).values()) == {1.0}


def test_slow_steps_make_decode_groups_larger_and_the_next_decision_begins_there():
    found = refined(basis(), measured(step=20.0), LEFT)
    assert found.changes["b_moe_decode"] > 64
    assert found.gain > LEAST_GAIN
    assert found.line.startswith("refined: ")
    assert "b_moe_decode 64 -> " in found.line
    assert "measured / profile: step 20.00" in found.line
    assert found.basis.settings == {**basis().settings, **found.changes}
    assert found.as_dict()["requests_left"] == 900
    stays = refined(found.basis, measured(step=20.0), LEFT)
    assert stays.changes == {}


def test_a_gain_below_the_least_changes_nothing():
    first = refined(basis(), measured(), LEFT)
    best = first.basis
    now = replace(best.candidate, b_moe_prefill=best.candidate.b_moe_prefill // 2 or 1)
    near = refined(replace(best, candidate=now), measured(), LEFT)
    assert near.changes == {}
    assert near.gain < LEAST_GAIN
    assert near.line.startswith("kept: ")
    assert near.basis.candidate == now


def test_what_the_user_gave_stays():
    pinned = {"b_moe_decode": 64, "b_attn_prefill": 1024, "accumulate": None}
    found = refined(
        basis(pinned=pinned, fixed_interval=True), measured(step=20.0), parse_workload("64:32x300,64:200x300")
    )
    assert not found.changes.keys() & {*pinned, "boundary_tokens"}
    whole_groups = refined(basis(pinned={"b_attn_decode": 0}), measured(step=20.0), LEFT)
    assert "b_moe_decode" in whole_groups.changes
    assert "b_attn_decode" not in whole_groups.changes


def test_unequal_outputs_shorten_the_interval_where_the_user_gave_none():
    unequal = parse_workload(",".join(["32:10x2,32:40x3"] * 40))
    pinned = {**limits_of(NOW), "accumulate": None, "b_moe_decode": 16, "b_attn_decode": 16}
    now = replace(NOW, b_moe_decode=16, b_attn_decode=16)
    found = refined(basis(now, pinned=pinned), measured(), unequal)
    assert found.changes.keys() == {"boundary_tokens"}
    assert found.changes["boundary_tokens"] < BatchConfig().schedule.boundary_tokens


def test_nothing_grows_beyond_the_memory_that_the_engine_has():
    def memory_of(candidate):
        return replace(ROOM, phases={"prefill": {"working": 100 if candidate.b_moe_decode <= 128 else 101}})

    gpu = replace(basis(memory_of=memory_of), allowed=Allowed(most_running=256))
    assert refined(gpu, measured(step=20.0), LEFT).changes["b_moe_decode"] == 128
    assert refined(basis(most_running=100), measured(step=20.0), LEFT).changes["b_moe_decode"] == 100
    for most in (limits_with_memory(NOW, reserved=reserved) for reserved in (True, False)):
        found = refined(basis(most=most), measured(step=20.0), LEFT)
        assert all(found.basis.settings[name] <= limit for name, limit in most.items())
        assert ("b_moe_decode" in found.changes) == ("b_moe_decode" not in most)


def test_where_kv_and_weights_lie_stays():
    found = refined(basis(), measured(step=20.0), LEFT)
    assert (found.basis.candidate.kv, found.basis.candidate.weights) == (DEVICE, "resident")


def test_without_measured_steps_there_is_no_decision():
    assert refined(basis(), replace(PASSES, part_s={}), LEFT) is None
    assert refined(basis(), replace(measured(), steps=0), LEFT) is None
    assert refined(basis(memory_of=lambda _: replace(ROOM, lacks="memory")), measured(), LEFT) is None
