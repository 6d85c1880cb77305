"""The sizes with which an engine starts: the planner's winner, what the user gave, and the defaults."""

from __future__ import annotations

from dataclasses import replace

import made_profiles as made
import pytest

from sgl_batch.config import BatchConfig, from_mapping
from sgl_batch.core.plan_rates import Load
from sgl_batch.errors import ConfigError
from sgl_batch.planner.candidate import EXCLUSIVE, INCLUSIVE
from sgl_batch.planner.followed_run import Room
from sgl_batch.planner.search import MemoryMap
from sgl_batch.planner.workload import parse_workload
from sgl_batch.startup.plan_inputs import plan_rates
from sgl_batch.startup.start_plan import PlanInputs, asked_workload, choose, conservative

ROOM = MemoryMap(phases={}, room=Room(device=100_000, store=200_000))
LIMITS = {"b_attn_prefill", "b_moe_prefill", "b_attn_decode", "b_moe_decode"}


def planned(workload="64:32x600", memory_of=lambda _: ROOM, rates=None, most_running=None, **given):
    found = PlanInputs(
        profile=made.profile(rates={"copy": 8e9, **(rates or {})}),
        layers=made.layers(),
        memory_of=memory_of,
        page_size=64,
        longest=640,
        most_running=most_running,
        again="sgl-batch plan --model m --profile",
    )
    return choose(from_mapping(given), given.keys(), found, parse_workload(workload))


def test_sizes_that_were_not_given_are_the_planners():
    plan = planned()
    assert plan.chosen.keys() >= LIMITS
    assert plan.chosen["b_moe_decode"] > BatchConfig().forward.b_moe_decode, "for a larger batch than the default group"
    assert plan.config == from_mapping(dict(plan.chosen))
    assert plan.source.startswith("measured profile of 2026-01-01: b_attn_prefill ")
    assert f"predicted {plan.prediction.seconds:,.1f} s for 600 requests" in plan.source
    workload = plan.as_dict()["workload"]
    assert (workload["prompt_tokens"], workload["output_tokens"]) == plan.workload.tokens
    assert plan.as_dict()["predicted"]["seconds"] == pytest.approx(plan.prediction.seconds, abs=0.001)


@pytest.mark.parametrize(
    "given",
    [
        {"b_moe_decode": 24},
        {"b_moe_decode": 256, "b_attn_prefill": 2048},
        {"accumulate": False},
        {"b_attn_decode": 0, "boundary_tokens": 16},
        {"b_attn_prefill": 64, "b_moe_prefill": 640, "b_attn_decode": 12, "b_moe_decode": 48, "accumulate": True},
    ],
)
def test_what_the_user_gave_stays(given):
    plan = planned(**given)
    flat = plan.config.flat()
    assert {name: flat[name] for name in given} == given
    assert not plan.chosen.keys() & given.keys()
    assert plan.prediction is not None


def test_with_a_store_the_place_of_kv_is_chosen_too():
    assert planned(kv_store_bytes=1 << 30).chosen["decode_kv"] in ("resident", "streamed")
    assert planned(kv_store_bytes=1 << 30, decode_kv="streamed").config.memory.decode_kv == "streamed"
    resident = planned(kv_store_bytes=1 << 30, decode_kv="resident")
    assert resident.chosen["kv_store_mode"] in (INCLUSIVE, EXCLUSIVE)
    exclusive = planned(kv_store_bytes=1 << 30, kv_store_mode="exclusive").config.memory
    assert (exclusive.kv_store_mode, exclusive.decode_kv) == ("exclusive", "resident")


def test_a_small_store_stays_exclusive_unless_the_user_asks_for_another():
    small = lambda _: MemoryMap(phases={}, room=Room(device=100_000, store=50_000))  # noqa: E731
    assert planned(memory_of=small, kv_store_bytes=1 << 20).config.memory.kv_store_mode == EXCLUSIVE
    asked = planned(memory_of=small, kv_store_bytes=1 << 20, decode_kv="streamed")
    assert asked.prediction is not None


def test_a_plan_takes_every_sequence_that_the_defaults_take():
    def memory_of(candidate):
        return replace(ROOM, room=Room(device=10 if candidate.b_moe_decode <= 256 else 9))

    assert planned("8:8x2000", memory_of=memory_of).config.forward.b_moe_decode <= 256
    assert planned("8:8x2000").config.forward.b_moe_decode > 256


def test_a_limit_of_running_sequences_holds():
    assert planned(most_running=40).config.forward.b_moe_decode <= 40


def test_a_prediction_of_other_lengths_is_of_the_same_sizes():
    plan = planned("64:32x64")
    twice = plan.predict(parse_workload("64:32x128"))
    assert plan.prediction.seconds < twice.seconds
    assert plan.predict(parse_workload("64:32x64")).seconds == pytest.approx(plan.prediction.seconds)


def test_where_nothing_fits_the_defaults_stay_and_the_reason_is_said():
    plan = planned(memory_of=lambda _: replace(ROOM, lacks="too little memory"), b_moe_decode=7)
    assert plan.config == from_mapping({"b_moe_decode": 7})
    assert plan.source == "conservative defaults (no plan fits: too little memory)"
    assert plan.prediction is plan.predict is None


def test_streamed_weights_need_the_rate_of_reading():
    assert "--profile --weights streamed measures it" in planned(weights="streamed").source
    assert planned(weights="streamed", rates={"disk": 2e9}).prediction.parts["weights"] > 0


def test_a_workload_that_cannot_be_read_is_refused_as_by_the_plan_command():
    assert asked_workload(BatchConfig()) is None
    assert asked_workload(from_mapping({"workload": "8:4x2"})).count == 2
    with pytest.raises(ConfigError, match="--workload is 'many'; it takes PROMPT:OUTPUTxCOUNT"):
        asked_workload(from_mapping({"workload": "many"}))


def test_the_rates_of_a_plan_predict_other_batches_about_as_the_plan_does():
    plan = planned("64:32x64", b_moe_decode=64)
    rates = plan_rates(plan)
    few = rates.seconds(Load(prompt_tokens=64, output_tokens=32, longest_output=32))
    assert few == pytest.approx(plan.predict(parse_workload("64:32x1")).seconds, rel=0.2)
    many = rates.seconds(Load(prompt_tokens=64 * 5000, output_tokens=32 * 5000, longest_output=32))
    assert many == pytest.approx(plan.predict(parse_workload("64:32x5000")).seconds, rel=0.1)
    assert plan_rates(conservative(BatchConfig(), "there is no profile")) is None
