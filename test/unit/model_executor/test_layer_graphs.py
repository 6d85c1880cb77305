"""Whole passes over decode groups run as graphs on memory that stays, and results are the whole model's to the bit.

Graphs here run their work anew: the work that was captured with the batch of one pass, on the rows of a later one.
"""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest
import torch
from sequence_builders import in_force
from toy_model import HIDDEN, ToyBackend, ToyFamily, ToyModel, by_hand, decode_batch, extend_batch

from rerunning_graphs import RerunningGraphs
from sgl_batch.core.graph_capture import PASSES_BEFORE_CAPTURE, captured_rows
from sgl_batch.core.plan import PhasePlan, Plan
from sgl_batch.core.units import FUSED, SPLIT
from sgl_batch.metrics.counters import Counters, PartClock
from sgl_batch.metrics.sampled_parts import DECODE, SAMPLE_EVERY, SampledParts
from sgl_batch.model_executor.layer_graphs import LayerGraphs
from sgl_batch.model_executor.layer_runner import LayerRunner

LAYERS = 3
PLENTY = 1 << 30
NAMES = ("graphs_captured", "graph_replays", "eager_steps")


class InPlaceFamily(ToyFamily):
    """As SGLang's layers on a GPU: norms answer in the memory that they are given, and so do experts."""

    def attention_half(self, layer, positions, hidden, residual, batch, rows=None):
        normed, summed = super().attention_half(layer, positions, hidden, residual, batch, rows)
        if residual is None:
            return normed, hidden
        return hidden.copy_(normed), residual.copy_(summed)

    def expert_half(self, layer, hidden, batch):
        return hidden.copy_(super().expert_half(layer, hidden, batch))

    def finish_layer(self, layer, hidden, residual, batch):
        super().finish_layer(layer, hidden, residual, batch)
        return hidden.mul_(0.9), residual

    def final_norm(self, model, hidden, residual):
        return hidden.add_(residual)


class Runs:
    """A runner over a toy model whose passes share what is captured."""

    def __init__(
        self,
        *,
        b_attn: int,
        b_moe: int = 32,
        accumulate: bool = True,
        family: type[ToyFamily] = ToyFamily,
        graphs: RerunningGraphs | None = None,
        budget_bytes: int = PLENTY,
        most_rows: int = 64,
        pool_tokens: int = 10**6,
    ) -> None:
        phase = PhasePlan(b_attn=b_attn, b_moe=b_moe, yield_option=SPLIT if accumulate else FUSED)
        plan = Plan(
            prefill=phase,
            decode=phase,
            page_size=8,
            boundary_tokens=8,
            refill_watermark=0.5,
            ready_target=8,
        )
        self.in_force, self.model, backend, self.counters = in_force(plan), ToyModel(LAYERS), ToyBackend(), Counters()
        self.family, self.graphs = family(backend), graphs or RerunningGraphs()
        self.layer_graphs = LayerGraphs(
            graphs=self.graphs,
            counters=self.counters,
            budget_bytes=budget_bytes,
            most_rows=most_rows,
            pool_tokens=pool_tokens,
            hidden_size=HIDDEN,
            dtype=torch.float32,
        )
        self.runner = LayerRunner(
            model=self.model,
            family=self.family,
            attn_backend=backend,
            counters=self.counters,
            in_force=self.in_force,
            can_reenter=True,
            expert_part="experts",
            layer_graphs=self.layer_graphs,
        )

    def limit(self, **limits: int) -> None:
        """Change the plan's limits of decode, as set_plan does between two steps."""
        plan = self.in_force.plan
        self.runner._in_force = in_force(replace(plan, decode=replace(plan.decode, **limits)))

    def check(self, batch) -> torch.Tensor:
        """Run a pass, whose result must be the whole model's."""
        logits = self.runner.forward(batch)[0]
        assert torch.equal(logits, by_hand(self.model, batch))
        return logits

    def warm(self, num_rows: int) -> None:
        """A group's size is captured, and so is the largest."""
        for step in range(PASSES_BEFORE_CAPTURE + 1):
            self.check(group(num_rows, step))

    def counted(self, batch) -> tuple[int, ...]:
        """Return what a pass adds to the counters of graphs: captures, replays, eager steps."""
        before = dict(self.counters.counts)
        self.check(batch)
        return tuple(self.counters.counts[name] - before.get(name, 0) for name in NAMES)


CAPTURE, REPLAY, EAGER = (1, 0, 0), (0, 1, 0), (0, 0, 1)


def group(num_rows: int, step: int = 0):
    """A decode group whose tokens, positions and KV indices differ from step to step."""
    batch = decode_batch([5 + i + 7 * step for i in range(num_rows)])
    batch.input_ids = (batch.input_ids + 13 * step) % 97
    batch.out_cache_loc = batch.out_cache_loc + 100 * step
    return batch


FAMILIES = pytest.mark.parametrize("family", [ToyFamily, InPlaceFamily])


@FAMILIES
@pytest.mark.parametrize("accumulate", [True, False])
@pytest.mark.parametrize("b_attn", [1, 3, 8, 20, 32])
def test_results_are_the_whole_models_while_groups_shrink_and_grow(family, accumulate, b_attn):
    runs = Runs(b_attn=b_attn, accumulate=accumulate, family=family)
    sizes = [size for size in (*range(30, 0, -1), *range(1, 31, 3)) for _ in range(PASSES_BEFORE_CAPTURE)]
    for step, num_rows in enumerate(sizes):
        runs.check(group(num_rows, step))
    assert runs.counters.counts["graphs_captured"] == len({captured_rows(size, 32) for size in (*sizes, 32)})
    assert runs.counters.counts["graph_replays"] > runs.counters.counts["graphs_captured"]


@pytest.mark.parametrize("b_attn", [4, 8, 32])
def test_a_step_of_a_captured_size_is_one_replay_whatever_its_sub_batches(b_attn):
    runs = Runs(b_attn=b_attn)
    runs.warm(21)
    for num_rows in (21, 22, 23, 24):
        assert runs.counted(group(num_rows, num_rows)) == REPLAY
        assert runs.family.expert_rows[0][-1] == 24, "all round up to one size"
    assert runs.counted(group(25, 1)) == EAGER
    assert runs.family.expert_rows[0][-1] == 25, "what runs eagerly is not padded"


def test_attention_calls_are_those_of_the_group_not_of_captures_or_padding():
    runs = Runs(b_attn=8)
    runs.warm(17)
    assert runs.counters.counts["attention_calls"] == (PASSES_BEFORE_CAPTURE + 1) * LAYERS * 3


def test_the_largest_size_is_captured_first():
    runs = Runs(b_attn=8)
    for step in range(PASSES_BEFORE_CAPTURE - 1):
        assert runs.counted(group(9, step)) == EAGER
    assert runs.layer_graphs.inputs is None, "nothing needs memory that stays"
    assert runs.counted(group(9, 4)) == CAPTURE
    assert runs.family.expert_rows[0][-1] == 32
    assert runs.counted(group(9, 5)) == CAPTURE
    assert runs.family.expert_rows[0][-1] == 10
    assert runs.counted(group(10, 6)) == REPLAY
    assert runs.counted(group(32, 7)) == REPLAY


def test_other_limits_free_the_graphs_and_capture_anew():
    runs = Runs(b_attn=8)
    runs.warm(21)
    taken = runs.counters.counts["graph_bytes"]
    runs.limit(b_attn=16)
    assert runs.counted(group(21, 1)) == EAGER
    assert runs.graphs.num_released == 1
    assert runs.counters.counts["graph_bytes"] == taken - 2 * runs.graphs.num_bytes
    runs.warm(21)
    assert runs.counted(group(22, 8)) == REPLAY
    assert runs.family.attention_rows[0][-2:] == [16, 8]
    assert runs.counters.counts["graph_bytes"] == taken
    runs.limit(b_attn=16, b_moe=20)
    assert runs.counted(group(21, 9)) == EAGER, "a group larger than the limit, until the next boundary"
    runs.warm(20)
    assert runs.family.expert_rows[0][-1] == 20


def test_when_the_budget_is_full_other_sizes_run_eagerly():
    runs = Runs(b_attn=8, graphs=RerunningGraphs(num_bytes=PLENTY))
    runs.warm(21)
    assert runs.graphs.num_captured == 1
    assert runs.counted(group(21, 8)) == EAGER
    assert runs.counted(group(31, 8)) == REPLAY, "the largest was captured"
    assert runs.counters.counts["graph_bytes"] == PLENTY + runs.layer_graphs.inputs.num_bytes


@FAMILIES
@pytest.mark.parametrize("refused_from", [0, 1])
def test_where_capturing_fails_sizes_not_captured_run_eagerly_and_a_warning_says_so(family, refused_from, caplog):
    runs = Runs(b_attn=8, family=family, graphs=RerunningGraphs(refused_from=refused_from))
    with caplog.at_level(logging.WARNING):
        runs.warm(21)
        runs.check(group(21, 8))
    assert runs.graphs.num_captured == refused_from
    (warning,) = caplog.messages
    assert "cannot be captured as a CUDA graph (operation not permitted)" in warning
    assert runs.counted(group(21, 9)) == EAGER


def test_a_sub_batch_with_more_tokens_than_the_pool_runs_eagerly():
    runs = Runs(b_attn=8, pool_tokens=8 * 50)
    runs.warm(21)
    assert runs.counted(group(21, 1)) == REPLAY
    assert runs.counted(group(21, 9)) == EAGER


def test_a_group_larger_than_the_fixed_memory_runs_eagerly_and_padding_fits_it():
    runs = Runs(b_attn=8, most_rows=22)
    for step in range(2 * PASSES_BEFORE_CAPTURE):
        assert runs.counted(group(23, step)) == EAGER
    runs.warm(21)
    assert runs.family.expert_rows[0][-1] == 22


def test_results_do_not_lie_in_memory_that_the_next_pass_overwrites():
    runs = Runs(b_attn=8, family=InPlaceFamily)
    runs.model.logits_processor = lambda input_ids, hidden, lm_head, batch: (hidden, batch)
    runs.model.lm_head = 1.0
    runs.warm(21)
    first = runs.check(group(21, 5))
    kept = first.clone()
    runs.check(group(21, 6))
    assert torch.equal(first, kept)


def test_prefill_and_streamed_decode_run_eagerly():
    class Source:
        first_kv_index = 0
        spans = ((0, 8), (8, 21))

        def redirect_pool(self):
            pass

        def restore_pool(self):
            pass

        def before_attention(self, layer, index):
            pass

        def after_attention(self, layer, index, end):
            pass

    runs = Runs(b_attn=8)
    for step in range(2 * PASSES_BEFORE_CAPTURE):
        assert runs.counted(extend_batch([0, 3], [7, 5 + step])) == (0, 0, 0)
    runs.runner.decode_source = Source()
    for step in range(2 * PASSES_BEFORE_CAPTURE):
        assert runs.counted(group(21, step)) == EAGER


def test_a_step_whose_parts_are_measured_runs_eagerly():
    class Event:
        def query(self):
            return True

        def elapsed_time(self, end_event):
            return 1.0

    runs = Runs(b_attn=8)
    runs.warm(21)
    runs.counters.clock = PartClock(SampledParts(Event))
    kinds = []
    for step in range(SAMPLE_EVERY + 2):
        with runs.counters.clock.device_pass(DECODE):
            kinds.append(runs.counted(group(21, step % 3)))
    assert kinds == [*[REPLAY] * (SAMPLE_EVERY - 1), EAGER, REPLAY, REPLAY]
    assert runs.counters.clock.read()["experts"] > 0
