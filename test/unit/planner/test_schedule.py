"""The predicted run of a batch: groups, intervals, tiers of KV, and batches too large to follow one by one."""

from __future__ import annotations

import random

import made_profiles as made
import pytest

from sgl_batch.config import from_mapping
from sgl_batch.core.plan import make_plan
from sgl_batch.planner.candidate import DEVICE, INCLUSIVE, STREAMED, Candidate
from sgl_batch.planner.cost_model import fit
from sgl_batch.planner.expert_room import ExpertRoom
from sgl_batch.planner.followed_run import FORECAST, RESERVE, Room
from sgl_batch.planner.pass_cost import NEW_MEMORY, WEIGHTS, PassCost
from sgl_batch.planner.schedule import COARSE, FINE, Detail, predict
from sgl_batch.planner.workload import Followed, Request, Workload, parse_workload

COSTS = fit(made.profile(), made.layers())


def run(
    workload, *, room=None, kv=DEVICE, boundary_tokens=64, b_moe_decode=32, b_moe_prefill=2048, costs=COSTS, **more
):
    candidate = Candidate(
        b_attn_prefill=512,
        b_moe_prefill=b_moe_prefill,
        b_attn_decode=min(32, b_moe_decode),
        b_moe_decode=b_moe_decode,
        kv=kv,
        **more,
    )
    settings = {name: value for name, value in candidate.settings.items() if name.startswith("b_")}
    config = from_mapping({**settings, "boundary_tokens": boundary_tokens})
    plan = make_plan(config, page_size=64, max_running=2 * b_moe_decode)
    return predict(
        Followed(workload if isinstance(workload, Workload) else parse_workload(workload)),
        plan,
        PassCost(costs, made.layers(), candidate, cores=4),
        room or Room(device=1_000_000),
        kv,
    )


def limits(b_moe_decode):
    return {"b_attn_prefill": 512, "b_moe_prefill": 2048, "b_attn_decode": 16, "b_moe_decode": b_moe_decode}


def plan_of(b_moe_decode):
    return make_plan(from_mapping(limits(b_moe_decode)), page_size=64, max_running=2 * b_moe_decode)


def cost_of(b_moe_decode):
    return PassCost(COSTS, made.layers(), Candidate(**limits(b_moe_decode)), cores=4)


def test_every_output_token_but_the_first_is_a_row_of_a_decode_step():
    found = run("100:40x64")
    assert found.rows == 64 * 39
    assert found.mean_rows <= 32
    assert found.groups * 2048 >= 64 * 100


def test_one_sequence_takes_one_prefill_and_its_steps():
    found = run("100:41x1")
    cost = PassCost(
        COSTS,
        made.layers(),
        Candidate(b_attn_prefill=512, b_moe_prefill=2048, b_attn_decode=32, b_moe_decode=32),
        cores=4,
    )
    expected = cost.prefill([100]).seconds + 40 * cost.decode(1, 120).seconds
    assert (found.groups, found.steps) == (1, 40)
    assert found.seconds == pytest.approx(expected, rel=0.05)


def test_outputs_of_one_token_need_no_decode_step():
    found = run("64:1x10")
    assert (found.steps, found.groups) == (0, 1)
    assert found.seconds == pytest.approx(found.prefill_s)


def test_larger_decode_groups_take_less_time():
    assert run("64:128x256", b_moe_decode=128).seconds < run("64:128x256", b_moe_decode=8).seconds


def test_a_long_tail_runs_in_small_groups():
    even = Workload(requests=[Request(64, 64)] * 64, count=64)
    tail = Workload(requests=[Request(64, 32)] * 63 + [Request(64, 2080)], count=64)
    assert run(tail).mean_rows < run(even).mean_rows / 4
    assert run(tail).seconds > run(even).seconds


@pytest.mark.parametrize(("ending", "least", "most"), [(4, 7.9, 8.0), (3, 5.0, 7.0)])
def test_a_boundary_comes_early_only_where_waiting_sequences_could_double_the_group(ending, least, most):
    """Of each eight sequences four, or three, end after a few steps, and an interval is as long as the others."""
    outputs = ([4] * ending + [200] * (8 - ending)) * 16
    mixed = Workload(requests=[Request(32, output) for output in outputs], count=len(outputs))
    assert least < run(mixed, boundary_tokens=199, b_moe_decode=8).mean_rows < most


def test_few_pages_make_small_groups():
    many, few = run("64:64x64"), run("64:64x64", room=Room(device=16))
    assert few.mean_rows <= 8 < many.mean_rows
    assert few.seconds > many.seconds


def test_a_sequence_that_never_fits_has_no_prediction():
    assert run("64:64x4", room=Room(device=1)) is None


def test_a_store_holds_sequences_that_the_device_does_not_and_restores_cost_copies():
    found = run("64:64x64", kv=INCLUSIVE, room=Room(device=64, store=1000))
    assert found.parts["copies"] > 0
    assert found.rows == 64 * 63


def test_streamed_groups_are_as_large_as_the_store():
    small = run("64:64x64", kv=INCLUSIVE, room=Room(device=16, store=1000))
    streamed = run("64:64x64", kv=STREAMED, room=Room(device=16, store=1000))
    assert streamed.mean_rows > small.mean_rows
    assert streamed.parts["copies"] > 0


def test_the_middle_of_a_large_batch_is_a_steady_state():
    whole = run("64:64x8192")
    assert whole.rows == pytest.approx(8192 * 63, rel=0.01)
    assert whole.seconds == pytest.approx(8 * run("64:64x1024").seconds, rel=0.1)


def test_memory_that_is_written_for_the_first_time_takes_time_once_for_the_most_that_is_held():
    rate, layers = 1e6, made.layers()
    new = fit(made.profile(rates={"new memory": rate}), layers)
    # Three groups of 20 prompts are admitted before a sequence ends, each of three pages.
    pages = 3 * 20 * 3
    expected = pages * 64 * layers.kv_layer_bytes * layers.num_layers / rate
    for count in (256, 512):
        found = run(f"100:60x{count}", costs=new)
        assert found.parts[NEW_MEMORY] == pytest.approx(expected)
        assert found.seconds - run(f"100:60x{count}").seconds == pytest.approx(expected)


STREAMING = fit(made.profile(rates={"disk": 2e9}), made.layers())
ALL = 8 * 64


def streamed(num_slots, *, page_bytes=0, prefill_slots=None, workload="100:40x64"):
    """The run of a batch with memory for so many experts, of all 512."""
    sizes = {"decode": num_slots, "prefill": num_slots if prefill_slots is None else prefill_slots}
    room = ExpertRoom(**sizes, page_bytes=page_bytes, stride=1, slot_bytes=1, layers=8, experts=64)
    return run(workload, room=Room(device=10_000, experts=room), costs=STREAMING, weights="streamed")


def test_experts_that_stay_in_memory_are_read_once():
    whole, some, none = (streamed(slots) for slots in (ALL, ALL // 2, 2 * 64))
    assert (whole.kept, none.kept) == (1.0, 0.0)
    assert 0 < some.kept < 0.5
    assert whole.parts[WEIGHTS] < some.parts[WEIGHTS] < none.parts[WEIGHTS]
    # Every later step would wait longer than it computes.
    assert whole.seconds < none.seconds / 3


def test_pages_take_memory_from_experts_only_once_they_are_held():
    few, many = (streamed(ALL + 64, page_bytes=1, workload=f"100:40x{count}") for count in (4, 64))
    assert few.kept == 1.0 > many.kept


def test_experts_that_prefill_had_no_memory_for_are_read_again_by_the_first_step():
    cold, warm = streamed(ALL, prefill_slots=2 * 64), streamed(ALL)
    assert warm.kept == cold.kept == 1.0
    assert cold.parts[WEIGHTS] > warm.parts[WEIGHTS]


DRAW = random.Random(5)
LONG_TAIL = Workload(
    requests=[Request(DRAW.randint(40, 130), min(int(DRAW.lognormvariate(3.5, 1.2)) + 2, 900)) for _ in range(700)],
    count=6000,
)


def of_long_tail(detail, b_moe_decode=128, device=4000, **options):
    plan = plan_of(b_moe_decode)
    return predict(
        Followed(LONG_TAIL), plan, cost_of(b_moe_decode), Room(device=device), DEVICE, detail=detail, **options
    )


@pytest.mark.parametrize("b_moe_decode", [16, 128, 512])
def test_a_batch_that_is_followed_coarsely_takes_about_as_long(b_moe_decode):
    whole = of_long_tail(Detail(followed=6000, lanes=1 << 20), b_moe_decode)
    assert whole.rows == sum(LONG_TAIL.requests[i * 700 // 6000].output - 1 for i in range(6000))
    for detail, error in ((FINE, 0.03), (COARSE, 0.06)):
        found = of_long_tail(detail, b_moe_decode)
        assert found.seconds == pytest.approx(whole.seconds, rel=error)
        assert found.rows == pytest.approx(whole.rows, rel=error)


def test_with_a_forecast_more_sequences_run_and_those_that_outgrow_it_may_stall():
    detail = Detail(followed=6000, lanes=1 << 20)
    reserved, forecast = (of_long_tail(detail, 512, 600, admission=admission) for admission in (RESERVE, FORECAST))
    assert forecast.rows == reserved.rows
    assert forecast.mean_rows > reserved.mean_rows
    assert forecast.parts["copies"] > reserved.parts["copies"] == 0


def test_a_boundary_comes_early_where_those_that_wait_could_double_the_group():
    unequal = Workload(requests=[Request(64, 8)] * 31 + [Request(64, 500)] + [Request(64, 8)] * 32, count=64)
    early, every = (run(unequal, b_moe_decode=32, boundary_tokens=tokens) for tokens in (96, 1))
    assert early.seconds == pytest.approx(every.seconds, rel=0.05)
