"""Bounds of the GPU comparison: bytes and FLOP by hand, data sheets by the names of GPUs, goals and their shares."""

from __future__ import annotations

import pytest
from comparison.figures import Spread
from gpu_comparison.bounds import case_bound, copied_bytes, copy_share, ratio, verdicts
from gpu_comparison.cases import Case, Role
from gpu_comparison.data_sheets import Rates, sheet_of
from gpu_comparison.found import Found, Visit
from gpu_comparison.goals import GOALS, Goal, Kind, Reached, judge
from gpu_comparison.machine_rates import Machine, describe, measured_rates
from gpu_comparison.roofline import (
    COPY_IN,
    MEMORY,
    PRODUCTS,
    Pass,
    Work,
    bound_of,
    decode_pass,
    expected_distinct,
    prefill_pass,
)
from gpu_comparison.routing import Distinct, distinct_experts, distinct_tokens, replayed_rows, steps_of
from gpu_comparison.shapes import ITEM_BYTES, qwen3_30b, tiny
from gpu_stand_ins import FAST, OURS, case, regime

RATES = Rates(source="test", memory_bytes_per_s=100.0, flop_per_s=1000.0, copy_in_bytes_per_s=10.0)
QWEN = qwen3_30b(48)


def spread(*values: float) -> Spread:
    ordered = sorted(values)
    return Spread(median=ordered[len(ordered) // 2], low=ordered[0], high=ordered[-1], count=len(ordered))


@pytest.mark.parametrize(
    ("name", "source", "memory", "flop"),
    [
        ("NVIDIA H200, 143771 MiB, driver 580.95.05", "data sheet of H200 SXM", 4.8e12, 989.5e12),
        ("NVIDIA H200 NVL, 143771 MiB", "data sheet of H200 NVL", 4.8e12, 835.5e12),
        ("NVIDIA H100 80GB HBM3, 81559 MiB", "data sheet of H100 SXM", 3.35e12, 989.5e12),
        ("NVIDIA H100 PCIe, 81559 MiB", "data sheet of H100 PCIe", 2.0e12, 756.5e12),
        ("NVIDIA A100-SXM4-40GB, 40960 MiB", "data sheet of A100 40GB", 1.555e12, 312e12),
        ("NVIDIA A100-SXM4-80GB, 81920 MiB", "data sheet of A100 80GB SXM", 2.039e12, 312e12),
        ("NVIDIA A100 80GB PCIe, 81920 MiB", "data sheet of A100 80GB PCIe", 1.935e12, 312e12),
        ("NVIDIA B200, 183359 MiB", "data sheet of B200", 8e12, 2250e12),
        ("NVIDIA L40S, 46068 MiB", "data sheet of L40S", 864e9, 362.05e12),
        ("NVIDIA L4, 23034 MiB", "data sheet of L4", 300e9, 121e12),
    ],
)
def test_a_data_sheet_is_found_by_the_name_that_nvidia_smi_gives(name, source, memory, flop):
    sheet = sheet_of(name)
    assert sheet is not None
    assert (sheet.source, sheet.memory_bytes_per_s, sheet.flop_per_s) == (source, memory, flop)


def test_an_unknown_gpu_has_no_data_sheet_and_the_report_notes_it():
    assert sheet_of("NVIDIA L40, 46068 MiB") is None
    raw = {"memory_bytes_per_s": {"median": 2e9}, "flop_per_s": {"median": 3e12}}
    machine = Machine(measured=measured_rates(raw), raw=raw)
    assert describe(machine).splitlines() == [
        "- rates, measured in this run: device memory 2 GB/s, bfloat16 products 3.00 TFLOP/s",
        "- no data sheet of this device is known here",
    ]


def test_a_step_reads_the_weights_that_its_rows_choose_and_their_kv():
    step = decode_pass(QWEN, rows=64, context=1000, distinct=128, times=10)
    # All parameters but the embeddings, of which a token reads one row.
    assert step.weight_bytes == QWEN.weight_bytes - QWEN.vocabulary * QWEN.hidden * ITEM_BYTES
    assert step.kv_bytes == 64 * 1000 * 98304
    half = decode_pass(QWEN, rows=64, context=1000, distinct=64, times=10)
    assert step.weight_bytes - half.weight_bytes == 48 * 64 * QWEN.expert_bytes


def test_a_token_takes_two_flop_for_each_parameter_that_is_active():
    # 3.3 billion parameters are active, embeddings included.
    active = (QWEN.token_flop + QWEN.head_flop) / 2 + QWEN.vocabulary * QWEN.hidden
    assert active == pytest.approx(3.35e9, rel=0.01)


def test_prompts_attend_to_half_a_square_and_read_weights_once_a_group():
    shape = tiny(2)
    whole, cut = (prefill_pass(shape, [100, 100], group_tokens=tokens) for tokens in (200, 100))
    assert (whole.rows, whole.times, cut.rows, cut.times) == (200, 1, 100, 2)
    attended = 2 * (100 * 101 / 2) * shape.attention_flop
    assert whole.flop == 200 * shape.token_flop + attended + 2 * shape.head_flop
    assert cut.flop == whole.flop / 2
    assert whole.weight_bytes == pytest.approx(cut.weight_bytes, rel=1e-6)


def test_even_routing_meets_nearly_all_experts_with_many_rows():
    assert expected_distinct(QWEN, 1) == pytest.approx(8)
    assert expected_distinct(QWEN, 64) == pytest.approx(125.9, abs=0.1)


def test_a_bound_adds_the_passes_and_names_the_slowest_resource():
    reading = Pass(rows=1, weight_bytes=50, kv_bytes=50, flop=1, times=4)
    computing = Pass(rows=1, weight_bytes=1, kv_bytes=0, flop=3000, times=1)
    bound = bound_of(Work(prefill=computing, decode=reading), RATES)
    assert (bound.seconds, bound.resource) == (7.0, MEMORY)
    bound = bound_of(Work(prefill=computing, decode=computing), RATES)
    assert (bound.seconds, bound.resource) == (6.0, PRODUCTS)
    bound = bound_of(Work(prefill=computing, decode=reading, copy_in_bytes=80, copy_out_bytes=1e9), RATES)
    assert (bound.seconds, bound.resource) == (8.0, COPY_IN), "no rate of copies to the host is known"


def test_a_case_has_the_bound_of_its_own_rows_and_experts():
    visit = Visit(case=OURS, round=1, wall_s=2.0, decode_rows=2.0)
    found = Found(visits=[visit], distinct={OURS: Distinct(mean=4.0, least=3, rows=2)})
    machine = Machine(measured=RATES, sheet=Rates(source="data sheet", memory_bytes_per_s=1e3, flop_per_s=1e4))
    made = regime()
    bound = case_bound(made, found, machine, made.cases[0])
    assert bound is not None
    assert (bound.distinct, bound.distinct_counted, bound.rows_said) == (4.0, True, True)
    # Two prompts of 3 and 2 tokens, 4 generated each: the prefill gives the first, a step has both.
    assert bound.work.decode == decode_pass(made.shape, rows=2, context=5.0, distinct=4.0, times=3)
    measured, sheet = bound.against
    assert measured.share.median == pytest.approx(measured.bound.seconds / 2.0)
    assert sheet.bound.seconds == pytest.approx(measured.bound.seconds / 10)
    assert case_bound(made, found, machine, made.cases[1]) is None


def test_without_accumulation_a_step_reads_the_experts_of_each_call():
    off = Case(name=OURS, role=Role.OURS, engine="sgl_batch", arguments={"accumulate": False, "b_attn_decode": 1})
    assert [off.expert_rows(2.0), off.expert_rows(0.5), case(OURS).expert_rows(2.0)] == [1.0, 0.5, 2.0]
    found = Found(visits=[Visit(case=OURS, round=1, wall_s=2.0, decode_rows=2.0)])
    bound = case_bound(regime(off), found, Machine(), off)
    assert bound is not None
    assert (bound.calls, bound.distinct) == (2.0, pytest.approx(2.0)), "of top 2"
    whole = decode_pass(tiny(2), rows=2, context=5.0, distinct=4.0, times=3)
    assert bound.work.decode.weight_bytes == pytest.approx(whole.weight_bytes)


def test_unmeasured_numbers_are_estimated_and_marked_as_estimates():
    made = regime()
    bound = case_bound(made, Found(visits=[Visit(case=OURS, round=1, wall_s=2.0)]), Machine(), made.cases[0])
    assert bound is not None
    assert (bound.rows_said, bound.distinct_counted, bound.against) == (False, False, ())
    assert bound.work.decode.rows == 2


def test_pages_and_experts_that_were_copied_are_counted():
    store = Case(name=OURS, role=Role.OURS, engine="sgl_batch", arguments={"page_size": 2, "kv_store_bytes": 1})
    page = 2 * tiny(2).kv_token_bytes
    counters = {"pages_restored": 5, "pages_written_through": 3, "pages_copied_to_suspend": 1}
    visit = Visit(case=OURS, round=1, counters=counters)
    assert copied_bytes(regime(), store, visit) == (5 * page, (3 + 1 + 2 + 1) * page), "prompts of 2 pages and of 1"
    alone = Visit(case=OURS, round=1, counters={"prompts_prefilled_on_device": 2})
    assert copied_bytes(regime(), store, alone) == (0, 0)
    streamed = Visit(case=OURS, round=1, counters={"weights_routed": 7, "weights_kept": 4})
    assert copied_bytes(regime(), case(OURS, Role.OURS), streamed) == (3 * tiny(2).expert_bytes, 0)
    assert copied_bytes(regime(), case(FAST), Visit(case=FAST, round=1)) == (0, 0)


def walls(ours: list[float], best: list[float]) -> list[Visit]:
    visits = [Visit(case=OURS, round=number, wall_s=wall) for number, wall in enumerate(ours)]
    return visits + [Visit(case=FAST, round=number, wall_s=wall) for number, wall in enumerate(best)]


def test_a_ratio_is_paired_by_round():
    times = ratio(regime(), Found(visits=walls([10.0, 10.0], [14.0, 13.0])))
    assert times is not None
    assert (times.median, times.low, times.high) == pytest.approx((1.35, 1.3, 1.4))
    assert ratio(regime(), Found(visits=walls([10.0], []))) is None


def test_the_share_of_the_copies_is_of_experts_that_had_to_come():
    made = regime(goals=GOALS["weights"])
    per_expert = tiny(2).expert_bytes
    visit = Visit(case=OURS, round=1, wall_s=4.0, counters={"weights_routed": 9, "weights_kept": 3})
    rates = Rates(source="x", memory_bytes_per_s=1e18, flop_per_s=1e18, copy_in_bytes_per_s=2.0 * per_expert)
    whole = Found(visits=[visit, Visit(case=FAST, round=1, wall_s=13.0)])
    share = copy_share(made, whole, Machine(measured=rates))
    assert share is not None
    assert share.median == pytest.approx(0.75)
    times, copies = verdicts(made, whole, Machine(measured=rates), is_tiny=False)
    assert (times.met, copies.met, copies.goal.text(), copies.found) == (
        True,
        True,
        "70% (share of the host's copy rate)",
        "75% (75%-75%)",
    )
    unknown = verdicts(made, whole, Machine(), is_tiny=False)[1]
    assert (unknown.met, unknown.text) == (None, "no copy rate was measured between host and device")


def test_goals_are_met_in_the_median_or_in_every_round():
    reached = Reached(share=0.42, resource=MEMORY)
    times, floor = Goal(kind=Kind.TIMES, limit=1.3), Goal(kind=Kind.FLOOR, limit=1.0)

    def held(goal: Goal, *values: float) -> tuple[bool | None, str]:
        verdict = judge(goal, spread(*values), reached, is_tiny=False, fault="")
        return verdict.met, verdict.text

    assert held(times, 1.2, 1.3, 1.5) == (True, "met")
    assert held(times, 1.2, 1.29, 1.5) == (False, "missed: 42% of the bound by device memory")
    assert held(floor, 1.0, 1.2) == (True, "met")
    assert held(floor, 0.99, 1.2, 1.3)[0] is False
    assert judge(times, None, None, is_tiny=False, fault="not run").text == "not run"
    assert judge(times, spread(9.0), reached, is_tiny=True, fault="").met is None


def test_the_goals_have_the_required_limits():
    limits = {name: [(goal.kind, goal.limit) for goal in goals] for name, goals in GOALS.items()}
    assert limits == {
        "kv": [(Kind.TIMES, 1.3)],
        "tight": [(Kind.TIMES, 1.5)],
        "weights": [(Kind.TIMES, 3.0), (Kind.COPY_BOUND, 0.7)],
        "prefill": [(Kind.TIMES, 1.5)],
        "resident": [(Kind.FLOOR, 1.0)],
    }


def test_sequences_that_became_alike_have_few_distinct_tokens_and_experts():
    assert distinct_tokens([[1, 2, 3], [4, 2, 3], [5, 6, 3]]) == pytest.approx((1 + 2 / 3) / 2), "the last is not fed"
    alike = [[[[0, 1], [2, 3]]] * 4]
    apart = [[[[row, row + 1], [2, 3]] for row in range(4)]]
    assert distinct_experts(alike, 4) == Distinct(mean=2.0, least=2, rows=4)
    assert distinct_experts(apart, 9) == Distinct(mean=(5 + 2) / 2, least=2, rows=4)
    assert distinct_experts(apart, 2) == Distinct(mean=(3 + 2) / 2, least=2, rows=2), "by steps of two rows"
    assert distinct_experts(apart, 3) == Distinct(mean=(4 + 2) / 2, least=2, rows=3)


def test_steps_are_spread_over_an_output_and_replays_over_a_million_tokens():
    assert steps_of(1024)[0] == 126
    assert steps_of(1024)[-1] == 1022
    assert steps_of(3) == [0, 1]
    assert steps_of(1) == [0]
    prompts: list[list[int]] = [[0] * 8192] * 64
    assert replayed_rows(prompts, 1024, 4) == (1 << 20) // (9216 * 4)
    assert replayed_rows([[0] * 16] * 64, 16, 4) == 64
    assert replayed_rows(prompts, 1 << 21, 4) == 1


def test_the_rates_of_a_cpu_are_measured_for_real():
    from runners.device_rates import measure

    raw = measure({"device": "cpu", "rounds": 1, "num_bytes": 1 << 16, "width": 32})
    assert set(raw) == {"memory_bytes_per_s", "flop_per_s"}
    assert all(0 < value["low"] <= value["median"] <= value["high"] for value in raw.values())
    assert measured_rates(raw).copy_in_bytes_per_s is None


def test_the_size_of_a_prompt_group_is_the_cases_or_the_default():
    def group(**arguments: int) -> int:
        return Case(name="x", role=Role.PEER, engine="stock", arguments=arguments).group_tokens

    assert group(b_moe_prefill=16384) == group(chunked_prefill_size=16384) == 16384
    assert group() == group(chunked_prefill_size=-1) == 8192
