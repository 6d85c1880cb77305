"""Halves of decode groups run on memory that stays, whatever is captured, and results are the whole model's to the bit.

Graphs here run their work anew: the work that was captured with the memory of one pass, on that of a later one.
"""

from __future__ import annotations

import logging

import pytest
import torch
from sequence_builders import in_force
from toy_model import HIDDEN, ToyBackend, ToyFamily, ToyModel, by_hand, decode_batch, extend_batch

from rerunning_graphs import RerunningGraphs
from sgl_batch.core.graph_capture import MEETINGS
from sgl_batch.core.plan import PhasePlan, Plan
from sgl_batch.core.units import FUSED, SPLIT
from sgl_batch.model_executor.counters import Counters
from sgl_batch.model_executor.graphed_halves import GraphedHalves
from sgl_batch.model_executor.layer_runner import LayerRunner

LAYERS = 3
PLENTY = 1 << 30


class PlannedRows:
    """A toy plan is the slots that its rows write to: those of a group, at an address that stays."""

    def __init__(self, most_rows: int, most_slots: int) -> None:
        self._slots = torch.full((most_rows,), -1)
        self._most_slots = most_slots

    @property
    def num_bytes(self) -> int:
        return 0

    def load(self, plans, padded: int) -> bool:
        if sum(count for _, count in plans) > self._most_slots:
            return False
        slots = [slot for plan, _ in plans for slot in plan]
        self._slots[:padded] = torch.tensor(slots + [0] * (padded - len(slots)))
        return True

    def plan(self, start: int, rows: int) -> list[int]:
        return self._slots[start : start + rows].tolist()


class FixingBackend(ToyBackend):
    def fixed_plans(self, most_rows: int, most_slots: int) -> PlannedRows:
        return PlannedRows(most_rows, most_slots)


class InPlaceFamily(ToyFamily):
    """As SGLang's layers on a GPU: norms answer in the memory that they are given, and so do experts."""

    def attention_half(self, layer, positions, hidden, residual, batch):
        normed, summed = super().attention_half(layer, positions, hidden, residual, batch)
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


class MovingFamily(ToyFamily):
    """What follows the experts answers in new memory, and with another residual: between layers it is doubled."""

    def attention_half(self, layer, positions, hidden, residual, batch):
        return super().attention_half(layer, positions, hidden, None if residual is None else residual / 2, batch)

    def finish_layer(self, layer, hidden, residual, batch):
        hidden, residual = super().finish_layer(layer, hidden, residual, batch)
        return hidden, residual * 2

    def final_norm(self, model, hidden, residual):
        return hidden + residual / 2


class Runs:
    """A runner over a toy model whose passes share what is captured."""

    def __init__(
        self,
        *,
        b_attn: int,
        b_moe: int = 64,
        accumulate: bool = True,
        family: type[ToyFamily] = ToyFamily,
        backend: type[ToyBackend] = FixingBackend,
        graphs: RerunningGraphs | None = None,
        budget_bytes: int = PLENTY,
        most_rows: int = 64,
        most_slots: int = 10**6,
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
        self.model, backend_, self.counters = ToyModel(LAYERS), backend(), Counters()
        self.family, self.graphs = family(backend_), graphs or RerunningGraphs()
        parts = {"model": self.model, "family": self.family, "attn_backend": backend_, "counters": self.counters}
        self.graphed = GraphedHalves(
            **parts, graphs=self.graphs, budget_bytes=budget_bytes, most_rows=most_rows, most_slots=most_slots
        )
        self.runner = LayerRunner(
            **parts, in_force=in_force(plan), can_reenter=True, expert_part="experts", graphed=self.graphed
        )

    def check(self, batch) -> torch.Tensor:
        """Run a pass, whose result must be the whole model's."""
        logits = self.runner.forward(batch)[0]
        assert torch.equal(logits, by_hand(self.model, batch))
        return logits

    def warm(self, num_rows: int) -> None:
        """All of a group's shapes are captured."""
        for step in range(MEETINGS):
            self.check(group(num_rows, step))

    def counted(self, batch) -> dict[str, int]:
        """What a pass adds to the counters of graphs."""
        names = ("graphs_captured", "graph_replays", "eager_halves")
        before = dict(self.counters.counts)
        self.check(batch)
        return {name: self.counters.counts[name] - before.get(name, 0) for name in names}


def group(num_rows: int, step: int = 0):
    """A decode group, whose tokens, positions and slots differ from step to step."""
    batch = decode_batch([5 + i + 7 * step for i in range(num_rows)])
    batch.input_ids = (batch.input_ids + 13 * step) % 97
    batch.out_cache_loc = batch.out_cache_loc + 100 * step
    return batch


FAMILIES = pytest.mark.parametrize("family", [ToyFamily, InPlaceFamily, MovingFamily])


@FAMILIES
@pytest.mark.parametrize("accumulate", [True, False])
@pytest.mark.parametrize("b_attn", [1, 3, 8, 20, 64])
def test_results_are_the_whole_models_while_groups_shrink_and_grow(family, accumulate, b_attn):
    runs = Runs(b_attn=b_attn, accumulate=accumulate, family=family)
    sizes = [*range(30, 0, -1), *range(1, 31, 3)]
    for step, num_rows in enumerate(size for size in sizes for _ in range(3)):
        runs.check(group(num_rows, step))
    assert runs.counters.counts["graph_replays"] > runs.counters.counts["graphs_captured"] > 0


@FAMILIES
def test_a_captured_group_is_a_replay_for_each_half_of_each_layer(family):
    runs = Runs(b_attn=8, family=family)
    runs.warm(21)
    halves = LAYERS * (3 + 1)
    assert runs.graphs.num_captured == halves
    assert runs.counted(group(21, 9)) == {"graphs_captured": 0, "graph_replays": halves, "eager_halves": 0}
    assert runs.counters.counts["attention_calls"] == (MEETINGS + 1) * LAYERS * 3


def test_before_a_shape_has_been_met_a_few_times_all_is_eager_and_unpadded():
    runs = Runs(b_attn=8)
    for step in range(MEETINGS - 1):
        assert runs.counted(group(21, step)) == {"graphs_captured": 0, "graph_replays": 0, "eager_halves": LAYERS * 4}
    assert runs.family.expert_rows[0] == [21] * (MEETINGS - 1)
    assert runs.graphed.rows is None, "nothing needs memory that stays"


@FAMILIES
def test_groups_that_round_up_to_one_size_share_its_graphs(family):
    runs = Runs(b_attn=32, family=family)
    runs.warm(21)
    for num_rows in (22, 23, 24, 21):
        counted = runs.counted(group(num_rows, num_rows))
        assert counted == {"graphs_captured": 0, "graph_replays": 2 * LAYERS, "eager_halves": 0}
    assert runs.family.expert_rows[0][-4:] == [24] * 4
    assert runs.counted(group(25, 1))["graph_replays"] == 0


@FAMILIES
def test_full_sub_batches_keep_their_graphs_when_the_last_one_changes(family):
    runs = Runs(b_attn=8, family=family)
    runs.warm(21)
    counted = runs.counted(group(18, 5))
    assert counted == {"graphs_captured": 0, "graph_replays": 2 * LAYERS, "eager_halves": 2 * LAYERS}


@FAMILIES
@pytest.mark.parametrize("captures", range(1, 13))
def test_a_budget_may_end_between_any_two_halves(family, captures):
    runs = Runs(b_attn=8, family=family, graphs=RerunningGraphs(num_bytes=PLENTY // captures + 1))
    runs.warm(21)
    assert runs.graphs.num_captured == captures
    for step in range(3):
        counted = runs.counted(group(21 - step, step))
        assert counted["graph_replays"] + counted["eager_halves"] == LAYERS * 4
        assert counted["graphs_captured"] == 0
    stays = runs.graphed.rows.num_bytes
    assert runs.counters.counts["graph_bytes"] == captures * runs.graphs.num_bytes + stays


@FAMILIES
@pytest.mark.parametrize("captures", range(1, 2 * LAYERS))
def test_a_group_of_one_sub_batch_may_change_from_graphs_to_its_own_plan(family, captures):
    runs = Runs(b_attn=32, family=family, graphs=RerunningGraphs(num_bytes=PLENTY // captures + 1))
    runs.warm(21)
    counted = runs.counted(group(21, 7))
    assert counted == {"graphs_captured": 0, "graph_replays": captures, "eager_halves": 2 * LAYERS - captures}


def test_the_memory_that_stays_counts_to_the_budget():
    runs = Runs(b_attn=8, budget_bytes=64 * HIDDEN * 4, graphs=RerunningGraphs(num_bytes=0))
    runs.warm(21)
    assert runs.graphs.num_captured == 0
    assert runs.counted(group(21, 7))["eager_halves"] == LAYERS * 4


@FAMILIES
@pytest.mark.parametrize("refused_from", range(5))
def test_where_capturing_fails_what_is_not_captured_runs_eagerly_and_a_warning_says_so(family, refused_from, caplog):
    runs = Runs(b_attn=8, family=family, graphs=RerunningGraphs(refused_from=refused_from))
    with caplog.at_level(logging.WARNING):
        runs.warm(21)
        runs.check(group(21, 8))
    assert runs.graphs.num_captured == refused_from
    (warning,) = caplog.messages
    assert "cannot be captured as a CUDA graph (operation not permitted)" in warning
    assert runs.counted(group(21, 9))["graph_replays"] == refused_from


@FAMILIES
def test_a_backend_whose_plans_move_attends_eagerly_and_its_experts_are_graphs(family, caplog):
    runs = Runs(b_attn=8, family=family, backend=ToyBackend)
    with caplog.at_level(logging.WARNING):
        runs.warm(21)
    (warning,) = caplog.messages
    assert warning.startswith("ToyBackend has no plans at fixed addresses")
    counted = runs.counted(group(21, 9))
    assert counted == {"graphs_captured": 0, "graph_replays": LAYERS, "eager_halves": 3 * LAYERS}


def test_where_attention_is_eager_experts_are_given_zeros_for_padding_in_every_layer():
    class Watching(ToyFamily):
        def expert_half(self, layer, hidden, batch):
            assert not hidden[21:].any()
            return super().expert_half(layer, hidden, batch)

    runs = Runs(b_attn=8, family=Watching, backend=ToyBackend)
    runs.warm(21)
    for step in range(3):
        runs.check(group(21, step))
    assert runs.family.expert_rows[0][-1] == 24


def test_a_pass_with_more_slots_than_the_pool_attends_eagerly():
    runs = Runs(b_attn=8, most_slots=21 * 40)
    runs.warm(21)
    assert runs.counted(group(21, 1))["eager_halves"] == 0
    assert runs.counted(group(21, 9)) == {"graphs_captured": 0, "graph_replays": LAYERS, "eager_halves": 3 * LAYERS}


def test_a_group_larger_than_the_memory_that_stays_runs_eagerly():
    runs = Runs(b_attn=8, most_rows=20)
    for step in range(2 * MEETINGS):
        runs.check(group(21, step))
    assert runs.graphs.num_captured == 0
    runs.warm(20)
    assert runs.graphs.num_captured == LAYERS * 4


def test_padding_stays_within_the_memory_that_stays():
    runs = Runs(b_attn=32, most_rows=22)
    runs.warm(21)
    assert runs.family.expert_rows[0][-1] == 22


def test_no_shape_is_larger_than_a_sub_batch_or_a_group():
    runs = Runs(b_attn=21, b_moe=43)
    runs.warm(41)
    assert max(runs.family.attention_rows[0]) == 21
    runs.warm(43)
    assert max(runs.family.expert_rows[0]) == 43


def test_results_do_not_lie_in_memory_that_the_next_pass_overwrites():
    runs = Runs(b_attn=8, family=InPlaceFamily)
    runs.model.logits_processor = lambda input_ids, hidden, lm_head, batch: (hidden, batch)
    runs.model.lm_head = 1.0
    for step in range(MEETINGS):
        runs.check(group(21, step))
    first = runs.check(group(21, 5))
    kept = first.clone()
    runs.check(group(21, 6))
    assert torch.equal(first, kept)


def test_prefill_and_streamed_decode_run_eagerly():
    class Source:
        first_slot = 0
        spans = ((0, 8), (8, 21))

        def lead(self):
            pass

        def lead_back(self):
            pass

        def rows_wanted(self, layer, index):
            pass

        def rows_attended(self, layer, index, end):
            pass

    runs = Runs(b_attn=8)
    for step in range(2 * MEETINGS):
        runs.check(extend_batch([0, 3], [7, 5 + step]))
    runs.runner.decode_source = Source()
    for step in range(2 * MEETINGS):
        runs.check(group(21, step))
    assert runs.graphs.num_captured == 0
    assert "eager_halves" not in runs.counters.counts, "nobody wanted graphs"
