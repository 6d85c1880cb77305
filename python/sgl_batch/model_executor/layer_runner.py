"""Owns the loop over layers: attention by sub-batch, experts by group (BatchGen Algorithm 1).

A forward pass computes one *group*: prompts, or one token of each running sequence. Attention is cheap to split and
needs memory for each row; experts are efficient only with many rows. So each layer splits the group for attention and
combines it again for the experts:

    embedding -> hidden states [rows, hidden]
    each layer:
        sub-batch 1 --> norm, attention, norm --> yield --+
        sub-batch 2 --> norm, attention, norm --> yield --+--> accumulation buffer
        sub-batch 3 --> norm, attention, norm --> yield --+         |
                                                                    v
        hidden states of the group <-- one call of the router and the experts
                                       (several ranks: dispatch, experts, combine)
    last norm -> logits

In the last layer of prompts only the rows that the head reads go on from attention (last_rows).

The work between two yield points is a *unit* (core/units.py): the attention of one sub-batch in one layer, or the
expert call of one group. `LayerRunner` runs the units in the order that core/units gives. A pass may have two *parts*,
decode rows and prompts: attention takes each by itself, the experts take the rows of both. KV is written to the pool's
own pages, or to a `Staging` that brings it from the host store or takes it there. A decode pass may run as one captured
graph (`LayerGraphs`), which records this same loop.

The plan decides the sizes of sub-batches and groups; the ranks agree on the number of expert calls per layer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from sgl_batch.core.plan import PhasePlan, Plan, row_spans
from sgl_batch.core.plan_in_force import PlanInForce
from sgl_batch.core.units import ATTENTION, EXPERTS, HEAD, PassShape, Unit, static_order
from sgl_batch.layers.column_split import PassSplit
from sgl_batch.layers.moe.split_experts import MOST_ROWS
from sgl_batch.metrics.counters import Counters
from sgl_batch.model_executor.batch_split import SubBatch, split
from sgl_batch.model_executor.expert_exchange import ExpertExchange
from sgl_batch.model_executor.families import Family
from sgl_batch.model_executor.group_pass import Group, GroupPass, LastRows, Part, groups_of, shape_of
from sgl_batch.model_executor.kv_staging import Staging
from sgl_batch.model_executor.last_rows import last_rows
from sgl_batch.model_executor.layer_graphs import LayerGraphs
from sgl_batch.model_executor.partition_set import PartitionSet
from sgl_batch.model_executor.recorded_passes import RecordedPasses
from sgl_batch.model_executor.yield_callback import YieldCallback
from sgl_batch.sglang_adapter.logits_rows import batch_of_rows, rows_with_logits
from sgl_batch.sglang_adapter.types.batches import ForwardBatch, LogitsOutput
from sgl_batch.sglang_adapter.types.models import AttentionBackend, CausalModel


class LayerRunner:
    """Runs forward passes of one loaded model, each of one group, from one thread.

    Args:
        model: SGLang's loaded model, of a family that has an adapter.
        family: The adapter (families/base.py).
        attn_backend: SGLang's attention backend. It keeps its metadata of a batch in `forward_metadata`.
        in_force: The plan that gives the limits of groups and sub-batches. It is read anew in each pass.
        counters: Counts passes, rows and calls, and the time of each part.
        can_reenter: Whether `forward_metadata` may be swapped between sub-batches. Otherwise a group is one sub-batch.
        expert_part: The part of the clock to which an expert call counts, but for the time that kernels count.
        exchange: The exchange with the ranks that hold the other experts; None where this rank holds all.
        layer_graphs: Runs decode passes as captured graphs. It needs a rank without an exchange and without `on_yield`.
            Passes with a decode source or with prompts run eagerly.
        on_yield: Called after the attention of a sub-batch in each layer. KV must be in the pool's own pages.
        split: What products and attention read in a pass that ranks share; None where none can be shared.
        recorded: Runs decode passes of one sub-batch and passes without rows from a record, where `on_yield` is None
            and ranks exchange rows through shared memory, if they do.

    Attributes that the caller sets between two passes:
        expert_calls: How many expert calls each layer takes on every rank; all ranks set the same number.
        order: Gives the units of a pass in an admissible order. Any but the static one needs one rank, and KV in the
            pool's own pages.
        prefill_sink: Takes the KV of prompts away; None leaves it in the pool.
        decode_source: Brings the KV of decode rows; None finds it in the pool.
        partition: The set of ranks that run the same passes with the same rows, and share the work; None computes this
            rank's own rows. All ranks of the set set it before the same pass.
        all_rows: Whether the last layer computes rows that the head does not read, too: somebody else reads them. The
            argument of this name sets it at first.
    """

    def __init__(
        self,
        *,
        model: torch.nn.Module,
        family: Family,
        attn_backend: AttentionBackend,
        in_force: PlanInForce,
        counters: Counters,
        can_reenter: bool,
        expert_part: str,
        exchange: ExpertExchange | None = None,
        layer_graphs: LayerGraphs | None = None,
        on_yield: YieldCallback | None = None,
        split: PassSplit | None = None,
        recorded: RecordedPasses | None = None,
        all_rows: bool = False,
    ) -> None:
        self.model, self.family, self.attn_backend = model, family, attn_backend
        self._in_force, self.counters, self.can_reenter = in_force, counters, can_reenter
        self.expert_part, self.exchange, self.layer_graphs = expert_part, exchange, layer_graphs
        assert layer_graphs is None or (exchange is None and on_yield is None), (
            "no graph exchanges rows or calls a user"
        )
        self.on_yield = on_yield
        self.expert_calls = 1
        self.order: Callable[[PassShape], Iterable[Unit]] = static_order
        self.prefill_sink: Staging | None = None
        self.decode_source: Staging | None = None
        self._split = split
        assert recorded is None or on_yield is None, "no record calls a user"
        self._recorded = recorded
        self.all_rows = all_rows
        self.partition: PartitionSet | None = None

    @property
    def plan(self) -> Plan:
        """The plan in force."""
        return self._in_force.plan

    def forward(self, forward_batch: ForwardBatch) -> LogitsOutput:
        """Return the logits of a prefill group or a decode group, as the model's own forward gives them."""
        return self.forward_parts([forward_batch])[0]

    def forward_parts(self, batches: Sequence[ForwardBatch]) -> list[LogitsOutput]:
        """Run one pass over a prefill group, a decode group, or a decode group and prompts.

        Attention takes each batch by itself, in its forward mode; experts take the rows of all batches.

        Args:
            batches: One batch, or a decode batch and then a prefill batch. Two need `can_reenter`. They have at least
                one row each, and KV indices for all of their tokens.

        Returns:
            The logits of each batch, in order. They are the caller's.
        """
        assert len(batches) == 1 or self.can_reenter, "the attention backend holds the metadata of one batch"
        begun = time.perf_counter()
        self._count(batches)
        read = [None if self.all_rows else rows_with_logits(batch) for batch in batches]
        with self._shared():
            hidden = self._pass_by_graph(batches)
            if hidden is None:
                hidden = self._pass(batches, read)
            logits, first_row = [], 0
            for batch, counts in zip(batches, read, strict=True):
                last_row = first_row + (len(batch.input_ids) if counts is None else sum(counts))
                kept = batch if counts is None else batch_of_rows(batch, counts)
                logits.append(self._logits(kept, hidden[first_row:last_row]))
                first_row = last_row
        if len(batches) == 1 and not batches[0].forward_mode.is_decode():
            self.counters.add("prefill_us", round(1e6 * (time.perf_counter() - begun)))
        return logits

    @contextmanager
    def _shared(self) -> Iterator[None]:
        """Inside, products and attention are shared among the ranks of the partition, if there is one."""
        if self.partition is None:
            yield
            return
        assert self._split is not None, "a set of ranks is made where passes can be shared"
        self.counters.add("partitioned_passes")
        self._split.current = self.partition.split
        try:
            yield
        finally:
            self._split.current = None

    def _count(self, batches: Sequence[ForwardBatch]) -> None:
        for batch in batches:
            phase = "decode" if batch.forward_mode.is_decode() else "prefill"
            self.counters.add(f"{phase}_groups")
            self.counters.add(f"{phase}_rows", len(batch.input_ids))
            if batch.forward_mode.is_decode():
                self.counters.add("decode_kv_tokens", batch.seq_lens_sum or 0)
            calls = len(self._spans(batch)) * len(self.family.layers(self.model))
            self.counters.add("attention_calls", calls)
        if len(batches) > 1:
            self.counters.add("mixed_passes")

    def _pass_by_graph(self, batches: Sequence[ForwardBatch]) -> torch.Tensor | None:
        """Return the hidden states of a pass that runs as a captured graph, or None for one that runs eagerly."""
        if self.layer_graphs is None or not batches[0].forward_mode.is_decode():
            return None
        hidden = None
        as_others = self.order is static_order and not self.counters.clock.measures_parts
        if len(batches) == 1 and self.decode_source is None and as_others:
            hidden = self.layer_graphs.run(batches[0], self.plan.decode, lambda batch: self._pass([batch], [None]))
        self.counters.add("eager_steps", int(hidden is None))
        return hidden

    def _pass(self, batches: Sequence[ForwardBatch], read: Sequence[list[int] | None]) -> torch.Tensor:
        """Run a pass eagerly; return the hidden states after the last norm of the rows that are read [rows, hidden].

        `read`: as in `Part`, of each batch.
        """
        with self.counters.clock.part("attention"):
            parts = self._parts(batches, read)
            self._init_attn_metadata(parts)
        ids = batches[0].input_ids if len(batches) == 1 else torch.cat([batch.input_ids for batch in batches])
        hidden = self.family.embed(self.model, ids)
        if self._recorded is not None and self._may_be_recorded(parts):
            return self._recorded.run(parts[0], hidden, self._run_units)
        return self._run_units(parts, hidden)

    def _may_be_recorded(self, parts: Sequence[Part]) -> bool:
        """Return whether a pass is one decode sub-batch and one expert call a layer, for this rank alone or for all."""
        batch, limits = parts[0].batch, self.plan.decode
        one = len(parts) == 1 and batch.forward_mode.is_decode() and len(parts[0].sub_batches) == 1
        rows, fixed = len(batch.input_ids), self.order is static_order and self.decode_source is None
        # With more rows a shared pass computes experts in another way. A rank whose record is of more rows than this
        # pass has would gather other columns than a rank that has none.
        shared = self.partition is None or (self.partition.is_all and rows <= MOST_ROWS)
        return one and fixed and shared and self._makes_one_call() and rows <= limits.expert_rows

    def _makes_one_call(self) -> bool:
        """Return whether the ranks, if there are others, have agreed on one expert call a layer."""
        return self.exchange is None or self.expert_calls == 1

    def _parts(self, batches: Sequence[ForwardBatch], read: Sequence[list[int] | None]) -> list[Part]:
        parts, first_row = [], 0
        for batch, counts in zip(batches, read, strict=True):
            num_rows = len(batch.input_ids)
            sub_batches = split(batch, self._spans(batch), staging=self._staging(batch), first_row=first_row)
            span = first_row, first_row + num_rows
            parts.append(Part(batch=batch, span=span, sub_batches=sub_batches, read=counts))
            first_row += num_rows
        return parts

    def _staging(self, batch: ForwardBatch) -> Staging | None:
        """Return the memory through which the KV of a batch passes, or None for the pool's own pages."""
        return self.decode_source if batch.forward_mode.is_decode() else self.prefill_sink

    def _spans(self, batch: ForwardBatch) -> Sequence[tuple[int, int]]:
        """Return the rows [start, end) of each sub-batch of a batch."""
        staging, num_rows = self._staging(batch), len(batch.input_ids)
        spans = None if staging is None else staging.spans
        if spans is not None:
            return spans
        phase = self.plan.decode if batch.forward_mode.is_decode() else self.plan.prefill
        return row_spans(num_rows, phase.b_attn) if self.can_reenter else [(0, num_rows)]

    def _logits(self, batch: ForwardBatch, hidden: torch.Tensor) -> LogitsOutput:
        loaded: Any = self.model
        model: CausalModel = loaded
        return model.logits_processor(batch.input_ids, hidden, model.lm_head, batch)

    def forward_without_rows(self, hidden_size: int, dtype: torch.dtype, device: torch.device) -> None:
        """Take part in the exchanges of a forward pass in which this rank has no rows.

        A rank that has no rows must call this whenever other ranks run a pass. Without an exchange it returns at once.
        """
        if self.exchange is None:
            return
        nothing = torch.empty(0, hidden_size, dtype=dtype, device=device)
        self.counters.add("forwards_without_rows")
        if self._recorded is not None and self._makes_one_call():
            self._recorded.run_without_rows(partial(self._exchange_nothing, self.exchange, nothing))
        else:
            self._exchange_nothing(self.exchange, nothing)

    def _exchange_nothing(self, exchange: ExpertExchange, nothing: torch.Tensor) -> None:
        for layer in self.family.layers(self.model):
            with self.counters.clock.part(self.expert_part):
                for _ in range(self.expert_calls):
                    exchange.run(self.family, layer, nothing, None)

    def _init_attn_metadata(self, parts: Sequence[Part]) -> None:
        share_scratch = getattr(self.attn_backend, "share_scratch", None)
        for part in parts:
            staging = part.sub_batches[0].staging
            if staging is not None:
                staging.redirect_pool()
            for sub in part.sub_batches:
                self.attn_backend.init_forward_metadata(sub.forward_batch)
                sub.attn_metadata = getattr(self.attn_backend, "forward_metadata", None)
                if share_scratch is not None:
                    share_scratch(sub.attn_metadata, part.sub_batches[0].attn_metadata)
            if staging is not None:
                staging.restore_pool()

    def _run_units(self, parts: Sequence[Part], hidden: torch.Tensor) -> torch.Tensor:
        """Run the units of a pass over these rows, one after the other; return the rows after the last norm."""
        state = self._begin(parts, hidden)
        for unit in self.order(state.shape):
            if unit.kind == HEAD:
                break
            if unit.kind != EXPERTS:
                self._attend(state, unit.layer, unit.number)
            if unit.kind != ATTENTION:
                self._combine(state, unit.layer, unit.number)
        return self._head(state)

    def _begin(self, parts: Sequence[Part], hidden: torch.Tensor) -> GroupPass:
        limits, layers = self._limits(parts), self.family.layers(self.model)
        assert limits.yield_option in self.family.yield_options, f"{limits.yield_option} is not offered by the family"
        groups = groups_of(parts, limits.yield_option, hidden)
        state = GroupPass(
            shape=shape_of(parts, len(layers), limits.yield_option),
            layers=layers,
            sub_batches=[sub for part in parts for sub in part.sub_batches],
            groups=groups,
            most_rows=limits.expert_rows,
            last_rows=last_rows(parts, self.attn_backend, by_sub_batch=len(groups) > 1),
        )
        if self.order is not static_order:
            fixed = self.exchange is not None or any(sub.staging for sub in state.sub_batches)
            assert not fixed, "staged KV and ranks need the static order of units"
        return state

    def _limits(self, parts: Sequence[Part]) -> PhasePlan:
        """Return the plan's limits for a pass of these parts."""
        if len(parts) > 1:
            return self.plan.mixed
        return self.plan.decode if parts[0].batch.forward_mode.is_decode() else self.plan.prefill

    def _attend(self, state: GroupPass, index: int, number: int) -> None:
        """Run the attention of a sub-batch in a layer, up to its yield point before the experts."""
        sub, group = state.sub_batches[number], state.group_of(number)
        if sub.staging is not None:
            with self.counters.clock.part("copies"):
                sub.staging.before_attention(index, sub.number)
        with self.counters.clock.part("attention"):
            start, end = sub.span[0] - group.span[0], sub.span[1] - group.span[0]
            hidden = group.hidden[start:end]
            residual = None if group.residual is None else group.residual[start:end]
            kept = state.kept_of(number, index)
            yielded = self._attention(state, index, sub, hidden, residual, kept)
            if self.on_yield is not None:
                assert sub.staging is None, "a callback changes KV in the pool's own pages"
                self.on_yield(sub.forward_batch, index)
            if kept is None or kept.span[0] < kept.span[1]:
                state.buffer_of(group, index).put((start, end) if kept is None else kept.span, *yielded)
        if sub.staging is not None:
            sub.staging.after_attention(index, sub.number, sub.end_in_part)

    def _attention(
        self,
        state: GroupPass,
        index: int,
        sub: SubBatch,
        hidden: torch.Tensor,
        residual: torch.Tensor | None,
        kept: LastRows | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the attention half of a layer for a sub-batch's rows, with its own attention metadata."""
        batch = sub.forward_batch
        if kept is not None:
            self.attn_backend.forward_metadata = kept.attn_metadata
        elif len(state.sub_batches) > 1:
            self.attn_backend.forward_metadata = sub.attn_metadata
        rows = None if kept is None else kept.index
        return self.family.attention_half(state.layers[index], batch.positions, hidden, residual, batch, rows)

    def _combine(self, state: GroupPass, index: int, number: int) -> None:
        """Run the experts of a layer for a group: one call, or several if the group has more rows than one may have."""
        group, layer = state.group_of(number), state.layers[index]
        outputs, residuals = [], []
        buffer = state.buffer_of(group, index)
        with self.counters.clock.part(self.expert_part):
            while buffer.ready():
                _, hidden, residual = buffer.take(state.most_rows)
                outputs.append(self._expert_call(layer, group, hidden))
                residuals.append(residual)
            self._join_exchanges(state, group, layer, len(outputs))
        if not outputs:  # a group of its own for the middle of a prompt, of which the last layer keeps no row
            group.hidden = group.residual = group.hidden[:0]
            return
        hidden, residual = (rows[0] if len(rows) == 1 else torch.cat(rows) for rows in (outputs, residuals))
        group.hidden, group.residual = self.family.finish_layer(layer, hidden, residual, group.batch)

    def _expert_call(self, layer: torch.nn.Module, group: Group, hidden: torch.Tensor) -> torch.Tensor:
        if self.exchange is not None:
            return self.exchange.run(self.family, layer, hidden, group.batch, self.partition)
        return self.family.expert_half(layer, hidden, group.batch)

    def _join_exchanges(self, state: GroupPass, group: Group, layer: torch.nn.Module, calls: int) -> None:
        """After a layer's last group, join the calls that only other ranks still make, without rows."""
        if self.exchange is None:
            return
        state.calls += calls
        assert state.calls <= self.expert_calls, f"{state.calls} expert calls where {self.expert_calls} are agreed"
        if group is state.groups[-1]:
            for _ in range(self.expert_calls - state.calls):
                self.exchange.run(self.family, layer, group.hidden[:0], group.batch, self.partition)
            state.calls = 0

    def _head(self, state: GroupPass) -> torch.Tensor:
        """Apply the model's last norm to the rows of all groups."""
        hiddens, residuals = [], []
        for group in state.groups:
            assert group.residual is not None, "a model has at least one layer"
            hiddens.append(group.hidden)
            residuals.append(group.residual)
        hidden, residual = (rows[0] if len(rows) == 1 else torch.cat(rows) for rows in (hiddens, residuals))
        return self.family.final_norm(self.model, hidden, residual)
