"""The costs of primitives: each is measured on the engine's own code and reported with the step that it interrupts."""

from __future__ import annotations

import json
import random
from types import SimpleNamespace

import pytest
from comparison.figures import Spread
from gpu_comparison.shapes import tiny
from primitive_costs import decisions, decode_steps, kv_moves, migrations, within_pass
from primitive_costs.decode_steps import Steps
from primitive_costs.report import BATCHGEN, duration, markdown, share
from primitive_costs.timing import Cost, sample
from primitives import main

from sgl_batch.core.sequence import Status

SIZES = kv_moves.KVSizes(layers=2, part_bytes=256, page_size=4, copy_threads=1)


def cost(seconds: float, **more) -> Cost:
    given = {"category": "migrate", "operation": "o", "unit": "a sequence"}
    return Cost(**{**given, "samples_s": (seconds,), **more})


def steps(context: int, seconds: float) -> Steps:
    return Steps(context=context, batch=8, step_s=(seconds,), between_s=(seconds / 10,))


def test_a_sample_leaves_the_first_round_out_and_prepares_each():
    calls: list[str] = []
    found = sample(lambda: calls.append("call"), rounds=2, prepare=lambda: calls.append("prepare"), repeats=2)
    assert calls == ["prepare", "call", "call"] * 3
    assert len(found) == 2
    assert all(seconds > 0 for seconds in found)


def test_a_group_of_any_number_of_sub_batches_is_written_and_combined():
    found = within_pass.measure(batch=10, b_attn=4, hidden=16, layers=3, device="cpu", rounds=2)
    assert [one.category for one in found] == ["yield, within a pass", "combine, without KV"]
    assert "by 3 sub-batches" in found[0].operation
    assert {one.per_step for one in found} == {3.0}


def test_decisions_are_measured_for_one_rank_and_for_several():
    found = decisions.measure(batch=16, context=128, rounds=2)
    assert {one.category for one in found} == {
        "yield, between passes",
        "combine, without KV",
        "scheduling at a boundary",
        "partition",
    }
    assert all(len(one.samples_s) == 2 for one in found)


def test_sequences_of_a_batch_have_the_requested_context():
    made = decisions.sequences_of(3, 100, status=Status.RUNNING, first=5)
    assert [one.sequence_id for one in made] == ["s5", "s6", "s7"]
    assert all(100 <= one.kv_tokens + 1 <= 107 for one in made)


@pytest.mark.engine
def test_the_command_also_measures_an_engine(capsys, tmp_path):
    record = tmp_path / "record.json"
    sizes = ["--batch", "4", "--b-attn", "2", "--contexts", "64", "--layers", "2", "--steps", "2", "--rounds", "1"]
    assert main([*sizes, "--no-migration", "--device", "cpu", "--json", str(record)]) == 0
    text = capsys.readouterr().out
    assert "4 sequences, context 64" in text
    assert {category for category in BATCHGEN if f"| {category} " in text} == BATCHGEN.keys() - {"migrate"}
    figures = json.loads(record.read_text(encoding="utf-8"))
    assert len(figures["steps"]) == 1
    assert {one["context"] for one in figures["costs"]} == {0, 64}


def test_kv_is_measured_on_a_real_store_by_context():
    pytest.importorskip("sgl_batch_kernel.kv_store")
    found = kv_moves.measure(SIZES, batch=6, contexts=[4, 10], device="cpu", rounds=2)
    by_context = {context: [one for one in found if one.context == context] for context in (4, 10)}
    assert [one.category for one in by_context[10]] == ["suspend", "suspend", "combine, with KV", "combine, with KV"]
    whole, of_layer = by_context[10][2:]
    assert of_layer.samples_s == tuple(seconds / 2 for seconds in whole.samples_s)


def test_migration_is_measured_between_two_processes_and_by_page():
    found = migrations.measure(tiny(2), contexts=[20], page_size=8, rounds=1)
    assert [one.unit for one in found] == ["a sequence", "a page of 8 tokens"]
    assert found[0].samples_s[0] == pytest.approx(3 * found[1].samples_s[0])


@pytest.mark.parametrize(
    ("seconds", "text"), [(2.5, "2.50 s"), (0.0123, "12.3 ms"), (0.00123, "1.23 ms"), (4e-7, "0.40 us")]
)
def test_a_duration_is_printed_in_a_readable_unit(seconds, text):
    assert duration(Spread(median=seconds, low=seconds, high=seconds, count=1)) == text


def test_a_share_counts_the_calls_of_an_operation_over_the_step_of_its_context():
    known = [steps(64, 0.1), steps(256, 0.4)]
    assert share(cost(0.001, per_step=12.0), known) == "12 %"
    assert share(cost(0.2, context=256), known) == "50 % of one"
    assert share(cost(0.2, context=64), known) == "2.0 steps"
    assert share(cost(0.2), []) == ""


def test_the_report_shows_the_papers_order_of_magnitude_with_each_cost():
    text = markdown(tiny(2), [cost(0.002, context=64), cost(1e-6, category="suspend")], [steps(64, 0.1)], rounds=3)
    rows = [line for line in text.splitlines() if line.startswith(("| migrate", "| suspend"))]
    assert "2.00 ms" in rows[0]
    assert BATCHGEN["migrate"] in rows[0]
    assert "1.00 us" in rows[1]
    assert "Median (smallest-largest) of 3 rounds" in text
    assert "The decode step was left out." in markdown(tiny(2), [cost(1.0)], [], rounds=1)


def test_a_number_below_one_ends_the_command_with_one_line(capsys):
    assert main(["--batch", "0"]) == 1
    assert capsys.readouterr().err == "primitives.py: --batch is 0; it must be at least 1\n"


class Engine:
    """Stand in for an engine on a CPU whose prefill takes 3 s, a step 0.2 s, and a wait for requests what it will."""

    server_args = SimpleNamespace(device="cpu")

    def __init__(self) -> None:
        self._parts = {"attention": 0.0, "other": 0.0, "sampling": 0.0, "idle": 0.0}
        self._counters = {"decode_steps": 0, "prefill_us": 0}

    def batch_stats(self) -> dict[str, dict[str, float]]:
        return {"part_s": dict(self._parts), "counters": dict(self._counters)}

    def generate(self, *, input_ids: list[list[int]], sampling_params: dict[str, int]) -> None:
        assert {len(prompt) for prompt in input_ids} == {64}
        assert len({tuple(prompt[:-4]) for prompt in input_ids}) == 1, "their beginning is computed once"
        steps = sampling_params["max_new_tokens"] - 1
        for part, seconds in (("attention", 3 + 0.15 * steps), ("other", 0.05 * steps), ("idle", 100.0)):
            self._parts[part] += seconds
        self._counters["decode_steps"] += steps
        self._counters["prefill_us"] += 3_000_000


def test_a_decode_step_is_the_engines_time_without_prefill_and_waiting():
    found = decode_steps._steps(Engine(), random.Random(0), 4, 64, 8, 2, 1000)
    assert found.step_s == pytest.approx((0.2, 0.2))
    assert found.between_s == pytest.approx((0.05, 0.05))
