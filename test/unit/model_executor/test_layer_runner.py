"""Attention runs by sub-batch, experts by group, and results are those of the whole model in one pass."""

from __future__ import annotations

import math

import pytest
import torch
from sequence_builders import in_force
from toy_model import ToyBackend, ToyFamily, ToyModel, by_hand, decode_batch, extend_batch

from sgl_batch.core.plan import PhasePlan, Plan
from sgl_batch.core.units import FUSED, SPLIT
from sgl_batch.metrics import counters as counters_module
from sgl_batch.metrics.counters import Counters
from sgl_batch.model_executor.layer_runner import LayerRunner

LAYERS = 3
NO_LIMIT = 10**6


class Run:
    """One forward pass of a toy model under a plan, and what was called for it."""

    def __init__(
        self,
        batch,
        *,
        b_attn: int = NO_LIMIT,
        b_moe: int = NO_LIMIT,
        accumulate: bool = True,
        can_reenter: bool = True,
        num_layers: int = LAYERS,
        all_rows: bool = False,
    ) -> None:
        option = SPLIT if accumulate else FUSED
        phase, other = PhasePlan(b_attn=b_attn, b_moe=b_moe, yield_option=option), PhasePlan(b_attn=1, b_moe=1)
        is_decode = batch.forward_mode.is_decode()
        plan = Plan(
            prefill=other if is_decode else phase,
            decode=phase if is_decode else other,
            page_size=8,
            boundary_tokens=8,
            refill_watermark=0.5,
            ready_target=8,
        )
        self.model, self.backend, self.counters = ToyModel(num_layers), ToyBackend(), Counters()
        self.family = ToyFamily(self.backend)
        runner = LayerRunner(
            model=self.model,
            family=self.family,
            attn_backend=self.backend,
            in_force=in_force(plan),
            counters=self.counters,
            can_reenter=can_reenter,
            expert_part="experts",
            all_rows=all_rows,
        )
        self.logits, self.batch_of_logits = runner.forward(batch)

    def count(self, name: str) -> int:
        return self.counters.as_dict()["counters"].get(name, 0)


def group(phase: str, num_rows: int):
    """A decode group of so many sequences, or a prefill group of so many tokens in sequences of 7 or fewer."""
    if phase == "decode":
        return decode_batch([5 + i for i in range(num_rows)])
    news = [7] * (num_rows // 7) + ([num_rows % 7] if num_rows % 7 else [])
    return extend_batch([i % 3 for i in range(len(news))], news)


PHASES = pytest.mark.parametrize("phase", ["prefill", "decode"])


@PHASES
@pytest.mark.parametrize("b_attn", [1, 3, 7, NO_LIMIT])
@pytest.mark.parametrize("num_rows", [1, 6, 7, 8, 21, 40])
def test_the_result_is_the_whole_models_to_the_bit_whatever_the_sub_batches(phase, b_attn, num_rows):
    batch = group(phase, num_rows)
    run = Run(batch, b_attn=b_attn)
    assert torch.equal(run.logits, by_hand(run.model, batch))
    assert run.batch_of_logits.input_ids is batch.input_ids
    assert (run.batch_of_logits is batch) == (phase == "decode")


@PHASES
@pytest.mark.parametrize("b_attn", [1, 3, 7, NO_LIMIT])
@pytest.mark.parametrize("num_rows", [1, 6, 7, 8, 21, 40])
def test_a_layer_has_one_expert_call_and_no_more_attention_calls_than_needed(phase, b_attn, num_rows):
    run = Run(group(phase, num_rows), b_attn=b_attn)
    num_sub_batches = math.ceil(num_rows / b_attn)
    assert run.family.expert_rows == {0: [num_rows], 1: [num_rows], 2: [run.batch_of_logits.batch_size]}
    for rows in run.family.attention_rows.values():
        assert sum(rows) == num_rows
        assert len(rows) == num_sub_batches
        assert max(rows) <= b_attn
    assert run.count("attention_calls") == LAYERS * num_sub_batches
    assert run.backend.num_planned == num_sub_batches, "attention is planned once for all layers"


def test_all_attention_of_a_layer_comes_before_its_experts_and_these_before_the_next_layer():
    order = Run(group("decode", 6), b_attn=3).family.order
    assert order == [step for i in range(LAYERS) for step in [*[f"attention {i}"] * 2, f"experts {i}", f"finish {i}"]]


@PHASES
def test_a_group_and_its_rows_are_counted_by_phase(phase):
    run, other = Run(group(phase, 20), b_attn=3), {"prefill": "decode", "decode": "prefill"}[phase]
    assert (run.count(f"{phase}_groups"), run.count(f"{phase}_rows")) == (1, 20)
    assert (run.count(f"{other}_groups"), run.count(f"{other}_rows")) == (0, 0)


@PHASES
@pytest.mark.parametrize(("b_attn", "rows", "read"), [(3, [3, 3, 2], [2]), (8, [8], [2]), (NO_LIMIT, [8], [2])])
def test_without_accumulation_the_experts_are_called_once_for_each_sub_batch(phase, b_attn, rows, read):
    batch = group(phase, 8)
    run = Run(batch, b_attn=b_attn, accumulate=False)
    assert run.family.expert_rows == {0: rows, 1: rows, 2: rows if phase == "decode" else read}
    assert run.family.attention_rows == dict.fromkeys(range(LAYERS), rows)
    assert torch.equal(run.logits, by_hand(run.model, batch))


@pytest.mark.parametrize(("b_moe", "rows"), [(40, [40, 40, 20]), (99, [99, 1]), (100, [100])])
def test_a_single_prompt_longer_than_a_group_is_cut_for_the_experts(b_moe, rows):
    batch = extend_batch([0], [100])
    run = Run(batch, b_attn=30, b_moe=b_moe)
    assert run.family.expert_rows == {0: rows, 1: rows, 2: [1]}
    assert run.family.attention_rows[0] == [30, 30, 30, 10]
    assert torch.equal(run.logits, by_hand(run.model, batch))


@pytest.mark.parametrize(("accumulate", "rows", "read"), [(True, [20], [4]), (False, [8, 8, 4], [1, 2, 1])])
@pytest.mark.parametrize("num_layers", [1, 3])
@pytest.mark.parametrize("all_rows", [False, True])
def test_the_last_layers_experts_compute_the_read_rows_alone_unless_all_are_asked_for(
    all_rows, num_layers, accumulate, rows, read
):
    batch = extend_batch([0, 3, 0, 1], [4, 6, 1, 9])
    run = Run(batch, b_attn=8, accumulate=accumulate, num_layers=num_layers, all_rows=all_rows)
    assert torch.equal(run.logits, by_hand(run.model, batch))
    expected = dict.fromkeys(range(num_layers), rows) | ({} if all_rows else {num_layers - 1: read})
    assert run.family.expert_rows == expected


@PHASES
def test_a_backend_that_cannot_be_re_entered_takes_a_group_in_one_call(phase):
    batch = group(phase, 20)
    run = Run(batch, b_attn=3, can_reenter=False)
    assert run.family.attention_rows == {layer: [20] for layer in range(LAYERS)}
    assert run.backend.num_planned == 1
    assert torch.equal(run.logits, by_hand(run.model, batch))


def test_time_is_counted_to_attention_and_to_the_part_of_the_experts(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(counters_module.time, "perf_counter", lambda: now[0])

    def lasting(half, seconds):
        def timed(*args):
            now[0] += seconds
            return half(*args)

        return timed

    monkeypatch.setattr(ToyFamily, "attention_half", lasting(ToyFamily.attention_half, 1))
    monkeypatch.setattr(ToyFamily, "expert_half", lasting(ToyFamily.expert_half, 10))
    monkeypatch.setattr(ToyFamily, "final_norm", lasting(ToyFamily.final_norm, 100))
    part_s = Run(group("decode", 6), b_attn=3).counters.as_dict()["part_s"]
    assert (part_s["attention"], part_s["experts"], part_s["other"]) == (2 * LAYERS, 10 * LAYERS, 100)


def test_a_model_without_layers_is_an_error():
    with pytest.raises(AssertionError, match="at least one layer"):
        Run(decode_batch([3]), num_layers=0)
