"""Owns the halves of a decode group's layers that run as captured graphs: one launch for each, instead of one a kernel.

Which shapes are captured is core/graph_capture's; the loop over layers is layer_runner's, which runs everything else.
Rows, and attention's plans, lie at fixed addresses for the whole group, and each sub-batch has its graphs for its place
there. So the halves of a layer hand rows on without a copy and plans are laid down once in a pass; in return a shape is
captured for each place, where copies of rows and plans before every half would let all sub-batches share one.

This has not run on a GPU yet: it is tested on a CPU, with graphs that run their work anew on the same memory.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import torch

from sgl_batch.core.graph_capture import Captures, HalfShape, captured_rows, padded_shapes
from sgl_batch.core.plan import PhasePlan
from sgl_batch.model_executor.accumulation_buffer import AccumulationBuffer, bring
from sgl_batch.model_executor.batch_split import SubBatch
from sgl_batch.model_executor.counters import Counters
from sgl_batch.model_executor.cuda_graphs import CaptureError, Graphs
from sgl_batch.model_executor.families import Family
from sgl_batch.model_executor.fixed_rows import FixedRows
from sgl_batch.sglang_adapter.types.batches import ForwardBatch
from sgl_batch.sglang_adapter.types.models import AttentionBackend

logger = logging.getLogger(__name__)


class FixedPlans(Protocol):
    """Attention's plans for the sub-batches of a group, at addresses that stay; on the device they take `num_bytes`."""

    @property
    def num_bytes(self) -> int: ...

    def load(self, plans: Sequence[tuple[object, int]], padded: int) -> bool:
        """Take over a pass's plans, each with its number of slots, and pad; False where they do not fit."""

    def plan(self, start: int, rows: int) -> object:
        """The plan for rows [start, start + rows)."""


class GraphedHalves:
    """The graphs of one model, and what they read and write.

    `most_rows`: sequences of the largest group; `most_slots`: of the pool of KV; `budget_bytes`: device memory for all.
    An attention backend without `fixed_plans` attends eagerly; experts run as graphs under any. Weights and KV stay
    where they were when a half was captured, as SGLang's own graphs want it: an update of weights writes into their
    place.
    """

    def __init__(
        self,
        *,
        model: torch.nn.Module,
        family: Family,
        attn_backend: AttentionBackend,
        graphs: Graphs,
        counters: Counters,
        budget_bytes: int,
        most_rows: int,
        most_slots: int,
    ) -> None:
        self.family, self.attn_backend, self.counters = family, attn_backend, counters
        self.captures = Captures(budget_bytes)
        self.rows: FixedRows | None = None
        self.plans: FixedPlans | None = None
        self._graphs = graphs
        self._num_layers = len(list(family.layers(model)))
        self._most_rows, self._most_slots = most_rows, most_slots
        self._replays: dict[tuple[HalfShape, int], Callable[[], None]] = {}

    def begin(
        self,
        forward_batch: ForwardBatch,
        sub_batches: list[SubBatch],
        expert_spans: list[tuple[int, int]],
        phase: PhasePlan,
    ) -> GraphedPass | None:
        """What of a pass over a decode group runs as graphs; None where nothing does."""
        start, num_rows = sub_batches[-1].span
        if num_rows > self._most_rows:
            return None
        # The same padding for both halves, so that attention makes every row anew that experts are given.
        most = min(max(phase.b_attn, num_rows - start), max(phase.b_moe, num_rows) - start, self._most_rows - start)
        padded = start + captured_rows(num_rows - start, most)
        attention = padded_shapes("attention", [sub.span for sub in sub_batches], padded)
        experts = padded_shapes("experts", expert_spans, padded)
        met = [shape for shape in (*attention, *experts) if self.captures.meet(shape)]
        if not met:
            self.counters.add("eager_halves", self._num_layers * (len(attention) + len(experts)))
            return None
        return GraphedPass(self, forward_batch, sub_batches, met, padded)

    def lay_out(self, hidden: torch.Tensor, forward_batch: ForwardBatch) -> FixedRows:
        """The memory that stays, made when a pass first needs it."""
        if self.rows is None:
            self.rows = FixedRows(self._most_rows, hidden, forward_batch)
            make = getattr(self.attn_backend, "fixed_plans", None)
            self.plans = None if make is None else make(self._most_rows, self._most_slots)
            if self.plans is None:
                logger.warning(
                    "%s has no plans at fixed addresses: in decode groups of several sub-batches experts run as CUDA "
                    "graphs, and attention kernel by kernel",
                    type(self.attn_backend).__name__,
                )
            num_bytes = self.rows.num_bytes + (0 if self.plans is None else self.plans.num_bytes)
            self.captures.spend(num_bytes)
            self.counters.add("graph_bytes", num_bytes)
        return self.rows

    def run(self, shape: HalfShape, layer: int, work: Callable[[], None]) -> bool:
        """Run a half of a layer, as a graph from the second time on; False where it is left to be run eagerly."""
        replay = self._replays.get((shape, layer))
        if replay is not None:
            replay()
            self.counters.add("graph_replays")
            return True
        if not self.captures.goes_on:
            return False
        try:
            captured = self._graphs.capture(work)
        except CaptureError as error:
            logger.warning(
                "the %s of a layer cannot be captured as a CUDA graph (%s): what is not captured yet runs eagerly",
                shape.half,
                error,
            )
            self.captures.stop()
            return True
        self._replays[shape, layer] = captured.replay
        self.captures.add(shape, captured.num_bytes)
        self.counters.add("graphs_captured")
        self.counters.add("graph_bytes", captured.num_bytes)
        return True


class GraphedPass:
    """One pass over a decode group, of which some halves (`shapes`) run as graphs.

    Each takes rows from wherever they are; the pass's buffers, which it leaves them in, are the memory of the graphs.
    """

    def __init__(
        self,
        halves: GraphedHalves,
        forward_batch: ForwardBatch,
        sub_batches: list[SubBatch],
        shapes: Iterable[HalfShape],
        padded: int,
    ) -> None:
        self._halves, self._batch, self._sub_batches = halves, forward_batch, sub_batches
        self._shapes = {(shape.half, shape.start): shape for shape in shapes}
        self._padded = padded

    def load(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Lay the pass's rows and plans down; where its hidden states and residuals are."""
        halves, self._num_rows = self._halves, len(hidden)
        self._rows = halves.lay_out(hidden, self._batch)
        plans = [(sub.attention_plan, _slots_of(sub.forward_batch)) for sub in self._sub_batches]
        if halves.plans is None or not halves.plans.load(plans, self._padded):
            self._shapes = {place: shape for place, shape in self._shapes.items() if shape.half == "experts"}
        return self._rows.load(hidden, self._batch, self._padded)

    def attention(
        self,
        index: int,
        layer: torch.nn.Module,
        span: tuple[int, int],
        hidden: torch.Tensor,
        residual: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """The attention half of a layer for `span`, whose rows are given; None where it is to be run eagerly."""
        (start, end), rows = span, self._rows
        shape = self._shapes.get(("attention", start))
        bring(hidden, rows.hidden[start:end])
        if residual is not None:
            bring(residual, rows.residual[start:end])
        if shape is not None and self._halves.run(shape, index, self._attention_work(shape, layer, residual is None)):
            return rows.hidden[start:end], rows.residual[start:end]
        if end == self._num_rows:
            rows.clear(end, self._padded)
        self._halves.counters.add("eager_halves")
        return None

    def _attention_work(self, shape: HalfShape, layer: torch.nn.Module, is_first: bool) -> Callable[[], None]:
        halves, rows, batch = self._halves, self._rows, self._batch
        plans, part = halves.plans, slice(shape.start, shape.start + shape.rows)
        assert plans is not None, "attention runs as a graph where plans have fixed addresses"

        def work() -> None:
            own = rows.batch(batch, shape.start, shape.rows)
            halves.attn_backend.forward_metadata = plans.plan(shape.start, shape.rows)
            residual = None if is_first else rows.residual[part]
            hidden, residual = halves.family.attention_half(layer, own.positions, rows.hidden[part], residual, own)
            AccumulationBuffer.over(rows.hidden[part], rows.residual[part]).put((0, shape.rows), hidden, residual)

        return work

    def experts(
        self, index: int, layer: torch.nn.Module, span: tuple[int, int], hidden: torch.Tensor
    ) -> torch.Tensor | None:
        """The expert half of a layer for `span`, whose rows are given; None where it is to be run eagerly."""
        (start, end), rows = span, self._rows
        shape = self._shapes.get(("experts", start))
        bring(hidden, rows.hidden[start:end])
        if shape is not None and self._halves.run(shape, index, self._expert_work(shape, layer)):
            return rows.hidden[start:end]
        self._halves.counters.add("eager_halves")
        return None

    def _expert_work(self, shape: HalfShape, layer: torch.nn.Module) -> Callable[[], None]:
        halves, rows, batch = self._halves, self._rows, self._batch
        part = slice(shape.start, shape.start + shape.rows)

        def work() -> None:
            own = rows.batch(batch, shape.start, shape.rows)
            bring(halves.family.expert_half(layer, rows.hidden[part], own), rows.hidden[part])

        return work


def _slots_of(forward_batch: ForwardBatch) -> int:
    assert forward_batch.seq_lens_cpu is not None, "a batch over memory that stays is no pass's"
    return int(forward_batch.seq_lens_cpu.sum())
