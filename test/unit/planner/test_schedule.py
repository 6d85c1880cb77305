"""The predicted run of a batch: groups, intervals, tiers of KV, and batches too large to follow one by one."""

from __future__ import annotations

import made_profiles as made
import pytest

from sgl_batch.config import from_mapping
from sgl_batch.core.plan import make_plan
from sgl_batch.planner.candidate import DEVICE, INCLUSIVE, STREAMED, Candidate
from sgl_batch.planner.cost_model import fit
from sgl_batch.planner.pass_cost import NEW_MEMORY, PassCost
from sgl_batch.planner.schedule import Room, predict
from sgl_batch.planner.workload import Request, Workload, parse_workload

COSTS = fit(made.profile(), made.layers())


def run(workload, *, room=None, kv=DEVICE, boundary_tokens=64, b_moe_decode=32, b_moe_prefill=2048, costs=COSTS):
    candidate = Candidate(
        b_attn_prefill=512,
        b_moe_prefill=b_moe_prefill,
        b_attn_decode=min(32, b_moe_decode),
        b_moe_decode=b_moe_decode,
        kv=kv,
    )
    settings = {name: value for name, value in candidate.settings.items() if name.startswith("b_")}
    config = from_mapping({**settings, "boundary_tokens": boundary_tokens})
    plan = make_plan(config, page_size=64, max_running=2 * b_moe_decode)
    return predict(
        workload if isinstance(workload, Workload) else parse_workload(workload),
        plan,
        PassCost(costs, made.layers(), candidate, cores=4),
        room or Room(device=1_000_000),
        kv,
    )


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
