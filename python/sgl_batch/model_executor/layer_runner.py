"""Owns the loop over layers (BatchGen Algorithm 1): attention by sub-batch, experts by group (of all ranks).

It decides no sizes: those are the plan's, and the ranks' agreement on how many expert calls a layer takes. It works for
any family with an adapter in `families`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from sgl_batch.core.plan import PhasePlan, Plan, row_spans
from sgl_batch.core.plan_in_force import PlanInForce
from sgl_batch.model_executor.accumulation_buffer import AccumulationBuffer
from sgl_batch.model_executor.batch_split import SubBatch, split
from sgl_batch.model_executor.counters import Counters
from sgl_batch.model_executor.expert_exchange import ExpertExchange
from sgl_batch.model_executor.families import Family
from sgl_batch.model_executor.graphed_halves import GraphedHalves, GraphedPass
from sgl_batch.model_executor.kv_staging import Staging


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A forward batch of a pass, the rows [start, end) of the pass that are its own, and how they are cut."""

    batch: Any
    span: tuple[int, int]
    sub_batches: list[SubBatch]


class LayerRunner:
    """Runs one forward pass of a group. The attention backend keeps its plan for a batch in `forward_metadata`.

    `can_reenter`: whether that plan may be swapped between sub-batches; otherwise a group is one sub-batch.
    `expert_part`: the part of the clock that an expert call counts to, beside what kernels count themselves.
    `exchange`: where experts lie on several ranks, the way to them; then `expert_calls` says how many calls each layer
    takes on every rank in the coming forward passes.
    `graphed`: the halves of decode groups that run as captured graphs, where there is no exchange; with a decode
    source, or prompts beside the group, all run eagerly. `prefill_sink`, `decode_source`: what takes the KV of prompts
    away, and what brings that of decode rows, in the coming passes.
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
        self.prefill_sink: Staging | None = None
        self.decode_source: Staging | None = None

    @property
    def plan(self) -> Plan:
        """The plan in force."""
        return self._in_force.plan

    def forward(self, forward_batch: Any) -> Any:
        """Logits for a prefill group or a decode group, as the model's own forward gives them."""
        return self.forward_parts([forward_batch])[0]

    def forward_parts(self, batches: Sequence[Any]) -> list[Any]:
        """Logits for each batch of one pass: a prefill group, a decode group, or a decode group and prompts beside it.

        Attention takes each batch by itself, in its forward mode; experts take the rows of all. An attention backend
        that cannot hold the plans of several sub-batches (`can_reenter`) takes one batch a pass.
        """
        assert len(batches) == 1 or self.can_reenter, "the attention backend holds the plan of one batch"
        clock, begun = self.counters.clock, time.perf_counter()
        self._count(batches)
        with clock.part("attention"):
            parts = self._parts(batches)
            self._plan_attention(parts)
        ids = batches[0].input_ids if len(batches) == 1 else torch.cat([batch.input_ids for batch in batches])
        hidden = self._run_layers(parts, self.family.embed(self.model, ids))
        logits = [self._logits(part, hidden) for part in parts]
        if len(batches) == 1 and not batches[0].forward_mode.is_decode():
            self.counters.add("prefill_us", round(1e6 * (time.perf_counter() - begun)))
        return logits

    def _count(self, batches: Sequence[Any]) -> None:
        for batch in batches:
            phase = "decode" if batch.forward_mode.is_decode() else "prefill"
            self.counters.add(f"{phase}_groups")
            self.counters.add(f"{phase}_rows", len(batch.input_ids))
        if len(batches) > 1:
            self.counters.add("mixed_passes")

    def _parts(self, batches: Sequence[Any]) -> list[Part]:
        parts, first_row = [], 0
        for batch in batches:
            is_decode, num_rows = batch.forward_mode.is_decode(), len(batch.input_ids)
            phase = self.plan.decode if is_decode else self.plan.prefill
            staging = self.decode_source if is_decode else self.prefill_sink
            spans = self._spans(num_rows, phase, staging)
            sub_batches = split(batch, spans, staging=staging, first_row=first_row)
            parts.append(Part(batch=batch, span=(first_row, first_row + num_rows), sub_batches=sub_batches))
            first_row += num_rows
        return parts

    def _spans(self, num_rows: int, phase: PhasePlan, staging: Staging | None) -> Sequence[tuple[int, int]]:
        """The rows of each sub-batch of a part."""
        spans = None if staging is None else staging.spans
        if spans is not None:
            return spans
        return row_spans(num_rows, phase.b_attn) if self.can_reenter else [(0, num_rows)]

    def _logits(self, part: Part, hidden: torch.Tensor) -> Any:
        own, batch = hidden[slice(*part.span)], part.batch
        return self.model.logits_processor(batch.input_ids, own, self.model.lm_head, batch)

    def forward_without_rows(self, hidden_size: int, dtype: torch.dtype, device: torch.device) -> None:
        """Take part in the exchanges of a forward pass in which this rank has no rows of its own."""
        assert self.exchange is not None, "a lone rank without rows has nothing to do"
        nothing = torch.empty(0, hidden_size, dtype=dtype, device=device)
        self.counters.add("forwards_without_rows")
        for layer in self.family.layers(self.model):
            with self.counters.clock.part(self.expert_part):
                for _ in range(self.expert_calls):
                    self.exchange.run(self.family, layer, nothing, None)

    def _plan_attention(self, parts: Sequence[Part]) -> None:
        for part in parts:
            staging = part.sub_batches[0].staging
            if staging is not None:
                staging.lead()
            for sub in part.sub_batches:
                self.attn_backend.init_forward_metadata(sub.forward_batch)
                sub.attention_plan = getattr(self.attn_backend, "forward_metadata", None)
            if staging is not None:
                staging.lead_back()

    def _run_layers(self, parts: Sequence[Part], hidden: torch.Tensor) -> torch.Tensor:
        residual: torch.Tensor | None = None
        batch, sub_batches = parts[0].batch, [sub for part in parts for sub in part.sub_batches]
        limits = self._limits(parts)
        graphed = self._graphed_pass(parts, limits)
        if graphed is None:
            buffer = AccumulationBuffer(len(hidden), hidden.shape[-1], hidden.dtype, hidden.device)
        else:
            with self.counters.clock.part("attention"):
                buffer = graphed.load(hidden)
                hidden = buffer.hidden
        for index, layer in enumerate(self.family.layers(self.model)):
            for sub in sub_batches:
                if sub.staging is not None:
                    with self.counters.clock.part("copies"):
                        sub.staging.rows_wanted(index, sub.number)
                with self.counters.clock.part("attention"):
                    yielded = self._attention(index, layer, sub, hidden, residual, graphed)
                    if len(sub_batches) > 1 or graphed is not None:
                        buffer.write(sub.span, *yielded)
                if sub.staging is not None:
                    sub.staging.rows_attended(index, sub.number, sub.end_in_part)
            hidden, residual = yielded if len(sub_batches) == 1 and graphed is None else buffer.combined()
            hidden = self._experts(index, layer, batch, hidden, limits, graphed)
            hidden, residual = self.family.finish_layer(layer, hidden, residual, batch)
        assert residual is not None, "a model has at least one layer"
        if graphed is not None:
            # The norm may answer in the memory that it is given, which the next pass overwrites.
            hidden = hidden.clone()
        return self.family.final_norm(self.model, hidden, residual)

    def _limits(self, parts: Sequence[Part]) -> PhasePlan:
        """The limits of a pass of these parts."""
        if len(parts) > 1:
            return self.plan.mixed
        return self.plan.decode if parts[0].batch.forward_mode.is_decode() else self.plan.prefill

    def _graphed_pass(self, parts: Sequence[Part], limits: PhasePlan) -> GraphedPass | None:
        """What of a decode group runs as captured graphs, if anything does."""
        batch, sub_batches = parts[0].batch, parts[0].sub_batches
        alone = len(parts) == 1 and batch.forward_mode.is_decode() and self.decode_source is None
        if self.graphed is None or not alone:
            return None
        spans = row_spans(len(batch.input_ids), self.plan.expert_rows(limits))
        return self.graphed.begin(batch, sub_batches, spans, limits)

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
        limits: PhasePlan,
        graphed: GraphedPass | None,
    ) -> torch.Tensor:
        """The expert coroutine: one call over the group, or one per `b_moe` rows where a lone prompt is longer."""
        spans = row_spans(len(hidden), self.plan.expert_rows(limits))
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
