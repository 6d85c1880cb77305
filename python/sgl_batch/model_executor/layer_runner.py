"""Owns the loop over layers (BatchGen Algorithm 1): attention by sub-batch, experts by group (of all ranks).

It decides no sizes: those are the plan's, and the ranks' agreement on how many expert calls a layer takes. It works for
any family with an adapter in `families`.
"""

from __future__ import annotations

import time
from typing import Any, Protocol

import torch

from sgl_batch.core.plan import PhasePlan, Plan, row_spans
from sgl_batch.core.plan_in_force import PlanInForce
from sgl_batch.model_executor.accumulation_buffer import AccumulationBuffer
from sgl_batch.model_executor.batch_split import SubBatch, split
from sgl_batch.model_executor.counters import Counters
from sgl_batch.model_executor.expert_exchange import ExpertExchange
from sgl_batch.model_executor.families import Family
from sgl_batch.model_executor.graphed_halves import GraphedHalves, GraphedPass


class PrefillSink(Protocol):
    """Who takes the KV of a prefill group away, layer by layer. Layers are counted from this process's first."""

    first_slot: int
    """The slot with which the memory begins to which the group's KV is written."""

    def layer_begins(self, layer: int) -> None:
        """Attention of a layer is about to write."""

    def rows_attended(self, layer: int, end: int) -> None:
        """The KV of the group's rows up to `end` is written in a layer."""


class DecodeSource(Protocol):
    """Who brings the KV of a decode group, layer by layer and sub-batch by sub-batch, and takes away what is new."""

    first_slot: int
    """As in PrefillSink."""

    @property
    def spans(self) -> list[tuple[int, int]]:
        """The rows of each sub-batch of the coming pass; they cover every row once."""

    def rows_wanted(self, layer: int, index: int) -> None:
        """Attention of a sub-batch is about to read and write in a layer."""

    def rows_attended(self, layer: int, index: int) -> None:
        """It has."""


class LayerRunner:
    """Runs one forward pass of a group. The attention backend keeps its plan for a batch in `forward_metadata`.

    `can_reenter`: whether that plan may be swapped between sub-batches; otherwise a group is one sub-batch.
    `expert_part`: the part of the clock that an expert call counts to, beside what kernels count themselves.
    `exchange`: where experts lie on several ranks, the way to them; then `expert_calls` says how many calls each layer
    takes on every rank in the coming forward passes.
    `graphed`: the halves of decode groups that run as captured graphs, where there is no exchange; with a decode source
    all run eagerly.
    """

    def __init__(
        self,
        *,
        model: Any,
        family: Family,
        attn_backend: Any,
        in_force: PlanInForce,
        counters: Counters,
        can_reenter: bool,
        expert_part: str,
        exchange: ExpertExchange | None = None,
        graphed: GraphedHalves | None = None,
    ) -> None:
        self.model, self.family, self.attn_backend = model, family, attn_backend
        self._in_force, self.counters, self.can_reenter = in_force, counters, can_reenter
        self.expert_part, self.exchange, self.graphed = expert_part, exchange, graphed
        self.expert_calls = 1
        self.prefill_sink: PrefillSink | None = None
        self.decode_source: DecodeSource | None = None

    @property
    def plan(self) -> Plan:
        """The plan in force."""
        return self._in_force.plan

    def forward(self, forward_batch: Any) -> Any:
        """Logits for a prefill group or a decode group, as the model's own forward gives them."""
        is_decode = forward_batch.forward_mode.is_decode()
        phase = self.plan.decode if is_decode else self.plan.prefill
        num_rows = len(forward_batch.input_ids)
        self.counters.add("decode_groups" if is_decode else "prefill_groups")
        self.counters.add("decode_rows" if is_decode else "prefill_rows", num_rows)
        clock, begun = self.counters.clock, time.perf_counter()
        with clock.part("attention"):
            staging = self.decode_source if is_decode else self.prefill_sink
            first_slot = 0 if staging is None else staging.first_slot
            sub_batches = split(forward_batch, self._spans(is_decode, num_rows, phase), first_slot=first_slot)
            self._plan_attention(sub_batches)
        hidden = self.family.embed(self.model, forward_batch.input_ids)
        hidden = self._run_layers(forward_batch, sub_batches, hidden, phase)
        logits = self.model.logits_processor(forward_batch.input_ids, hidden, self.model.lm_head, forward_batch)
        if not is_decode:
            self.counters.add("prefill_us", round(1e6 * (time.perf_counter() - begun)))
        return logits

    def _spans(self, is_decode: bool, num_rows: int, phase: PhasePlan) -> list[tuple[int, int]]:
        """The rows of each sub-batch."""
        if is_decode and self.decode_source is not None:
            return self.decode_source.spans
        return row_spans(num_rows, phase.b_attn) if self.can_reenter else [(0, num_rows)]

    def forward_without_rows(self, hidden_size: int, dtype: torch.dtype, device: torch.device) -> None:
        """Take part in the exchanges of a forward pass in which this rank has no rows of its own."""
        assert self.exchange is not None, "a lone rank without rows has nothing to do"
        nothing = torch.empty(0, hidden_size, dtype=dtype, device=device)
        self.counters.add("forwards_without_rows")
        for layer in self.family.layers(self.model):
            with self.counters.clock.part(self.expert_part):
                for _ in range(self.expert_calls):
                    self.exchange.run(self.family, layer, nothing, None)

    def _plan_attention(self, sub_batches: list[SubBatch]) -> None:
        for sub in sub_batches:
            self.attn_backend.init_forward_metadata(sub.forward_batch)
            sub.attention_plan = getattr(self.attn_backend, "forward_metadata", None)

    def _run_layers(
        self, forward_batch: Any, sub_batches: list[SubBatch], hidden: torch.Tensor, phase: PhasePlan
    ) -> torch.Tensor:
        residual: torch.Tensor | None = None
        is_decode = forward_batch.forward_mode.is_decode()
        sink, source = (None, self.decode_source) if is_decode else (self.prefill_sink, None)
        graphed = self._graphed_pass(forward_batch, sub_batches, phase) if is_decode else None
        if graphed is None:
            buffer = AccumulationBuffer(len(hidden), hidden.shape[-1], hidden.dtype, hidden.device)
        else:
            with self.counters.clock.part("attention"):
                buffer = graphed.load(hidden)
                hidden = buffer.hidden
        for index, layer in enumerate(self.family.layers(self.model)):
            if sink is not None:
                sink.layer_begins(index)
            for number, sub in enumerate(sub_batches):
                if source is not None:
                    with self.counters.clock.part("copies"):
                        source.rows_wanted(index, number)
                with self.counters.clock.part("attention"):
                    yielded = self._attention(index, layer, sub, hidden, residual, graphed)
                    if len(sub_batches) > 1 or graphed is not None:
                        buffer.write(sub.span, *yielded)
                if source is not None:
                    source.rows_attended(index, number)
                if sink is not None:
                    sink.rows_attended(index, sub.span[1])
            hidden, residual = yielded if len(sub_batches) == 1 and graphed is None else buffer.combined()
            hidden = self._experts(index, layer, forward_batch, hidden, phase, graphed)
            hidden, residual = self.family.finish_layer(layer, hidden, residual, forward_batch)
        assert residual is not None, "a model has at least one layer"
        if graphed is not None:
            # The norm may answer in the memory that it is given, which the next pass overwrites.
            hidden = hidden.clone()
        return self.family.final_norm(self.model, hidden, residual)

    def _graphed_pass(self, forward_batch: Any, sub_batches: list[SubBatch], phase: PhasePlan) -> GraphedPass | None:
        """What of a decode group runs as captured graphs, if anything does."""
        if self.graphed is None or self.decode_source is not None:
            return None
        spans = row_spans(len(forward_batch.input_ids), self.plan.expert_rows(phase))
        return self.graphed.begin(forward_batch, sub_batches, spans, phase)

    def _attention(
        self,
        index: int,
        layer: Any,
        sub: SubBatch,
        hidden: torch.Tensor,
        residual: torch.Tensor | None,
        graphed: GraphedPass | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One attention coroutine: re-enter the sub-batch's plan, run up to its yield point before the experts."""
        self.counters.add("attention_calls")
        yielded = None if graphed is None else graphed.attention(index, layer, sub.span, hidden, residual)
        if yielded is not None:
            return yielded
        if graphed is not None or len(sub.forward_batch.input_ids) < len(hidden):
            self.attn_backend.forward_metadata = sub.attention_plan
        start, end = sub.span
        return self.family.attention_half(
            layer,
            sub.forward_batch.positions,
            hidden[start:end],
            None if residual is None else residual[start:end],
            sub.forward_batch,
        )

    def _experts(
        self,
        index: int,
        layer: Any,
        forward_batch: Any,
        hidden: torch.Tensor,
        phase: PhasePlan,
        graphed: GraphedPass | None,
    ) -> torch.Tensor:
        """The expert coroutine: one call over the group, or one per `b_moe` rows where a lone prompt is longer."""
        spans = row_spans(len(hidden), self.plan.expert_rows(phase))
        with self.counters.clock.part(self.expert_part):
            if self.exchange is not None:
                assert len(spans) <= self.expert_calls, (
                    f"{len(spans)} expert calls where {self.expert_calls} are agreed"
                )
                spans += [(len(hidden), len(hidden))] * (self.expert_calls - len(spans))
            parts = []
            for span in spans:
                part = None if graphed is None else graphed.experts(index, layer, span, hidden)
                parts.append(self._expert_call(layer, hidden[slice(*span)], forward_batch) if part is None else part)
            return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _expert_call(self, layer: Any, hidden: torch.Tensor, forward_batch: Any) -> torch.Tensor:
        if self.exchange is None:
            return self.family.expert_half(layer, hidden, forward_batch)
        return self.exchange.run(self.family, layer, hidden, forward_batch)
