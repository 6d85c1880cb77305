"""Predicts the seconds of a forward pass of a candidate plan, by part, from the cost model and the layer's graph."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace

from sgl_batch.core.plan import row_spans
from sgl_batch.planner.candidate import DEVICE, RESIDENT, STREAMED, Candidate
from sgl_batch.planner.cost_model import AttentionCost, CostModel
from sgl_batch.planner.layer_dag import EXCHANGE, FETCH, NOTHING, LayerWork, SubBatch, Work, layer_time
from sgl_batch.planner.model_layers import DENSE, MOE, ModelLayers
from sgl_batch.planner.roofline import OVERHEAD

STEP, INTAKE, COPIES, WEIGHTS, NEW_MEMORY = "step", "intake", "copies", "weights", "new memory"
_CACHED_SHARE, _ROW_BITS = 0.02, 6


@dataclass(frozen=True, slots=True, kw_only=True)
class PassTime:
    """Seconds of a pass by part, and by what bounds them, and what most of the layers' critical path is.

    `hideable_s`: of its waits for copies, what two groups by turns would hide.
    """

    parts: defaultdict[str, float]
    bounds: defaultdict[str, float]
    bottleneck: str
    hideable_s: float = 0.0

    @property
    def seconds(self) -> float:
        """Return the seconds of the whole pass."""
        return sum(self.parts.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class _Group:
    """A group of a phase. `spans`: rows of each sub-batch, and the tokens of KV that these look at."""

    attention: AttentionCost
    spans: Sequence[tuple[int, float]]
    fused: bool
    restores: bool = False
    offloads: bool = False

    @property
    def calls(self) -> list[int]:
        """Return the rows of each expert call."""
        rows = [span for span, _ in self.spans]
        return rows if self.fused else [sum(rows)]


Known = dict[Hashable, PassTime]


class PassCost:
    """Seconds of the passes of one candidate; questions that are almost equal are answered from memory.

    Args:
        costs: The fitted profile.
        model: The model.
        candidate: Its limits.
        cores: Of the machine, where copies take them from computation; 0 on a GPU.
        known: Answers so far. Candidates of one model, profile and machine may share it: many of their passes are
            equal.
    """

    def __init__(
        self, costs: CostModel, model: ModelLayers, candidate: Candidate, *, cores: int, known: Known | None = None
    ) -> None:
        self._costs, self._model, self._candidate = costs, model, candidate
        self._copy_cores = 1 / cores if cores else 0.0
        self._known: Known = {} if known is None else known

    def decode(self, rows: int, context: float) -> PassTime:
        """Return the time of a decode step of so many sequences, with so many tokens of KV each on average."""
        rows, looked_at = _rounded_rows(rows), _rounded(context)
        candidate, fused = self._candidate, self._fused(decode=True)
        limit = min(candidate.b_attn_decode, rows)
        key = True, rows, looked_at, limit, fused, candidate.kv == STREAMED, candidate.weights
        if key not in self._known:
            self._known[key] = self._decode(rows, looked_at)
        return self._known[key]

    def prefill(self, lengths: Sequence[int]) -> PassTime:
        """Return the time of a prefill group of prompts of these lengths, with the intake of their requests."""
        pairs = sum(length * (length + 1) // 2 for length in lengths)
        return self.prefill_of(sum(lengths), pairs, prompts=len(lengths))

    def prefill_of(self, tokens: int, pairs: int, *, prompts: int) -> PassTime:
        """Return the time of a prefill group of so many tokens, with the intake of so many requests.

        `pairs`: of one of these tokens and a token that it looks at.
        """
        tokens, looked_at = _rounded_rows(tokens), _rounded(pairs)
        candidate, fused = self._candidate, self._fused(decode=False)
        limit = min(candidate.b_attn_prefill, tokens)
        key = False, tokens, looked_at, limit, fused, candidate.kv != DEVICE, candidate.weights
        if key not in self._known:
            self._known[key] = self._layers(self._prefilled_group(tokens, looked_at))
        time, step = self._known[key], self._costs.step
        intake_s = step.group_s + step.sequence_s * prompts
        parts, bounds = defaultdict(float, time.parts), defaultdict(float, time.bounds)
        parts[INTAKE] += intake_s
        bounds[OVERHEAD] += intake_s
        return replace(time, parts=parts, bounds=bounds)

    def restore(self, tokens: float) -> PassTime:
        """Return the time of bringing the KV of so many tokens, of all layers, from the store to the device."""
        seconds = tokens * self._model.kv_layer_bytes * self._model.num_layers / self._rate("copy")
        copied = defaultdict[str, float](float, {COPIES: seconds})
        return PassTime(parts=copied, bounds=copied, bottleneck=COPIES)

    def new_memory(self, tokens: float) -> PassTime:
        """Return the time in which the kernel first provides memory for the KV of so many tokens, of all layers.

        A batch pays for it once, unless one before it has. Nothing where the rate was not measured.
        """
        rate = self._costs.rates.get("new memory")
        seconds = tokens * self._model.kv_layer_bytes * self._model.num_layers / rate if rate else 0.0
        provided = defaultdict[str, float](float, {NEW_MEMORY: seconds})
        return PassTime(parts=provided, bounds=defaultdict(float, {OVERHEAD: seconds}), bottleneck=NEW_MEMORY)

    def decode_layer(self, rows: int, context: float, kind: str) -> LayerWork:
        """Return the work of a layer of a kind in a decode step of so many sequences of so many tokens of KV."""
        return self._layer(self._decoded_group(rows, context), kind)

    def prefill_layer(self, lengths: Sequence[int], kind: str) -> LayerWork:
        """Return the work of a layer of a kind in a prefill group of prompts of these lengths."""
        looked_at = sum(length * (length + 1) // 2 for length in lengths)
        return self._layer(self._prefilled_group(sum(lengths), looked_at), kind)

    def _decode(self, rows: int, context: int) -> PassTime:
        time = self._layers(self._decoded_group(rows, context))
        step = self._costs.step
        time.parts[STEP] += step.decode.at(rows) + step.further_layers_s
        _add(time.bounds, step.decode.bounds(rows), 1)
        time.bounds[OVERHEAD] += step.further_layers_s
        return time

    def _prefilled_group(self, tokens: int, looked_at: float) -> _Group:
        spans = [end - start for start, end in row_spans(tokens, self._candidate.b_attn_prefill)]
        return _Group(
            attention=self._costs.prefill_attention,
            spans=[(rows, looked_at * rows / tokens) for rows in spans],
            fused=self._fused(decode=False),
            offloads=self._candidate.kv != DEVICE,
        )

    def _decoded_group(self, rows: int, context: float) -> _Group:
        spans = [end - start for start, end in row_spans(rows, self._candidate.b_attn_decode)]
        return _Group(
            attention=self._costs.decode_attention,
            spans=[(span, span * (context + 1.0)) for span in spans],
            fused=self._fused(decode=True),
            restores=self._candidate.kv == STREAMED,
        )

    def _fused(self, *, decode: bool) -> bool:
        """Return whether each sub-batch has an expert call of its own (core/plan.make_plan)."""
        accumulate = self._candidate.accumulate
        dense = MOE not in self._model.layers
        return accumulate is False or (accumulate is None and dense and not decode)

    def _layers(self, group: _Group) -> PassTime:
        passes_s = self._costs.pass_s * len(group.spans)
        parts = defaultdict[str, float](float, attention=passes_s)
        bounds = defaultdict[str, float](float, {OVERHEAD: passes_s})
        bottlenecks = defaultdict[str, float](float)
        hideable_s = 0.0
        for kind, count in self._model.layers.items():
            work = self._layer(group, kind)
            router, experts = self._costs.router[kind], self._costs.experts[kind]
            time = layer_time(work)
            parts["attention"] += count * sum(sub.attention.seconds for sub in work.sub_batches)
            parts["router"] += count * sum(router.at(rows) for rows in group.calls)
            parts["experts"] += count * sum(experts.at(rows) for rows in group.calls)
            waits_for = WEIGHTS if work.fetch is not NOTHING and time.bottleneck == FETCH else COPIES
            for part, seconds in ((waits_for, time.waits_s), (EXCHANGE, work.exchange.seconds)):
                parts[part] += count * seconds
                bounds[EXCHANGE if part == EXCHANGE else COPIES] += count * seconds
            for rows, looked_at in group.spans:
                _add(bounds, group.attention.bounds(rows, looked_at), count)
            for rows in group.calls:
                _add(bounds, router.bounds(rows), count)
                _add(bounds, experts.bounds(rows), count)
            bottlenecks[time.bottleneck] += count * time.seconds
            hideable_s += count * time.hideable_s
        bottleneck = max(bottlenecks, key=bottlenecks.__getitem__)
        return PassTime(parts=parts, bounds=bounds, bottleneck=bottleneck, hideable_s=hideable_s)

    def _layer(self, group: _Group, kind: str) -> LayerWork:
        router, experts = self._costs.router[kind], self._costs.experts[kind]
        called = [Work(seconds=router.at(rows) + experts.at(rows)) for rows in group.calls]
        subs = [
            SubBatch(
                attention=Work(seconds=group.attention.at(rows, looked_at)),
                write=Work(num_bytes=rows * self._model.hidden_bytes),
                restore=self._copied(looked_at) if group.restores else NOTHING,
                offload=self._copied(rows) if group.offloads else NOTHING,
                experts=called[index] if group.fused else NOTHING,
            )
            for index, (rows, looked_at) in enumerate(group.spans)
        ]
        return LayerWork(
            sub_batches=subs,
            experts=NOTHING if group.fused else called[0],
            exchange=self._exchanged(kind, group.calls),
            fetch=self._fetched(kind, sum(group.calls)),
            copy_cores=self._copy_cores,
        )

    def _exchanged(self, kind: str, calls: Sequence[int]) -> Work:
        exchange = self._costs.exchange
        if exchange is None or kind not in exchange.kinds:
            return NOTHING
        return Work(seconds=sum(exchange.at(rows) for rows in calls), num_bytes=exchange.row_bytes * sum(calls))

    def _copied(self, tokens: float) -> Work:
        num_bytes = tokens * self._model.kv_layer_bytes
        return Work(seconds=num_bytes / self._rate("copy"), num_bytes=num_bytes)

    def _fetched(self, kind: str, rows: int) -> Work:
        """Return the fetch of the experts that so many rows reach; the MLP of a dense layer stays in memory."""
        if self._candidate.weights == RESIDENT or kind == DENSE:
            return NOTHING
        num_bytes = self._model.experts_reached(rows) * self._model.expert_bytes_each
        return Work(seconds=num_bytes / self._rate("disk"), num_bytes=num_bytes)

    def _rate(self, name: str) -> float:
        rate = self._costs.rates.get(name)
        assert rate, f"candidates that need the rate of {name} are left out where it was not measured"
        return rate


def _add(bounds: defaultdict[str, float], more: Mapping[str, float], times: int) -> None:
    for name, seconds in more.items():
        bounds[name] += times * seconds


def _rounded_rows(rows: int) -> int:
    """Return the number with an error of less than two percent. Powers of two, as most limits are, stay exact."""
    step = 1 << max(rows.bit_length() - _ROW_BITS, 0)
    return (rows + step // 2) // step * step


def _rounded(number: float) -> int:
    """Return the number with an error of at most a few percent, so that few different questions are left."""
    grain = max(1, round(number * _CACHED_SHARE))
    return max(1, round(number / grain) * grain)
