"""Predicts the seconds of a forward pass of a candidate plan, by part, from the cost model and the layer's graph."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace

from sgl_batch.core.plan import row_spans
from sgl_batch.core.weight_residency import read_ahead_pays
from sgl_batch.planner.candidate import DEVICE, RESIDENT, STREAMED, Candidate
from sgl_batch.planner.cost_model import AttentionCost, CostModel
from sgl_batch.planner.layer_dag import EXCHANGE, FETCH, NOTHING, LayerWork, SubBatch, Work, layer_time
from sgl_batch.planner.model_layers import DENSE, MOE, ModelLayers
from sgl_batch.planner.roofline import OVERHEAD

STEP, INTAKE, COPIES, WEIGHTS, NEW_MEMORY = "step", "intake", "copies", "weights", "new memory"
# Leading bits of the rows that stay, the share of the context by which questions differ, and grades of kept experts.
_FINE, _COARSE = (6, 0.02, 256), (4, 0.15, 16)


@dataclass(frozen=True, slots=True, kw_only=True)
class PassTime:
    """Seconds of a pass by part, and by what bounds them, and what most of the layers' critical path is.

    `hideable_s`: of its waits for copies, what two groups by turns would hide.
    """

    parts: defaultdict[str, float]
    bounds: defaultdict[str, float]
    bottleneck: str
    hideable_s: float = 0.0

    @classmethod
    def of(cls, part: str, seconds: float, bound: str) -> PassTime:
        """Return the time of work that is one part with one bound."""
        parts, bounds = (defaultdict(float, {name: seconds}) for name in (part, bound))
        return cls(parts=parts, bounds=bounds, bottleneck=part)

    @property
    def seconds(self) -> float:
        """Return the seconds of the whole pass."""
        return sum(self.parts.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class _Group:
    """A group of a phase. `spans`: rows of each sub-batch, and the tokens of KV that these look at.

    `read`: the rows that the last layer's experts compute. `kept`: the share of each layer's experts that is in memory,
    where weights are streamed.
    """

    attention: AttentionCost
    spans: Sequence[tuple[int, float]]
    fused: bool
    read: int
    restores: bool = False
    offloads: bool = False
    kept: float = 0.0

    @property
    def calls(self) -> list[int]:
        """Return the rows of each expert call of a layer but the last."""
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
        coarse: Whether questions count as equal that differ by some percent, so that a search is soon done.
    """

    def __init__(
        self,
        costs: CostModel,
        model: ModelLayers,
        candidate: Candidate,
        *,
        cores: int,
        known: Known | None = None,
        coarse: bool = False,
    ) -> None:
        self._costs, self._model, self._candidate = costs, model, candidate
        self._copy_cores = 1 / cores if cores else 0.0
        self._known: Known = {} if known is None else known
        self._row_bits, self._share, self._kept_grades = _COARSE if coarse else _FINE

    def decode(self, rows: int, context: float, kept: float = 0.0) -> PassTime:
        """Return the time of a decode step of so many sequences, with so many tokens of KV each on average.

        `kept`: of streamed weights, the share of each layer's experts that is in memory before the step.
        """
        rows, looked_at = _rounded_rows(rows, self._row_bits), _rounded(context, self._share)
        candidate, fused, kept = self._candidate, self._fused(decode=True), self._rounded_share(kept)
        limit = min(candidate.b_attn_decode, rows)
        key = True, rows, looked_at, limit, fused, candidate.kv == STREAMED, candidate.weights, kept
        if key not in self._known:
            self._known[key] = self._decode(rows, looked_at, kept)
        return self._known[key]

    def prefill(self, lengths: Sequence[int], kept: float = 0.0) -> PassTime:
        """Return the time of a prefill group of prompts of these lengths, with the intake of their requests.

        `kept` is as in `decode`.
        """
        pairs = sum(length * (length + 1) // 2 for length in lengths)
        return self.prefill_of(sum(lengths), pairs, prompts=len(lengths), kept=kept)

    def prefill_of(self, tokens: int, pairs: int, *, prompts: int, kept: float = 0.0) -> PassTime:
        """Return the time of a prefill group of so many tokens, with the intake of so many requests.

        `pairs`: of one of these tokens and a token that it looks at. `kept` is as in `decode`.
        """
        time, intake_s = self.prefill_group(tokens, pairs, read=prompts, kept=kept), self.intake_s(prompts)
        parts, bounds = defaultdict(float, time.parts), defaultdict(float, time.bounds)
        parts[INTAKE] += intake_s
        bounds[OVERHEAD] += intake_s
        return replace(time, parts=parts, bounds=bounds)

    def prefill_group(self, tokens: int, pairs: int, *, read: int, kept: float = 0.0) -> PassTime:
        """Return the time of a prefill group as in `prefill_of`, but for the intake of its requests.

        `read`: of how many tokens logits are computed, which are all that the last layer's experts compute.
        """
        tokens, looked_at = _rounded_rows(tokens, self._row_bits), _rounded(pairs, self._share)
        read = min(_rounded_rows(read, self._row_bits), tokens)
        candidate, fused, kept = self._candidate, self._fused(decode=False), self._rounded_share(kept)
        limit = min(candidate.b_attn_prefill, tokens)
        key = False, tokens, read, looked_at, limit, fused, candidate.kv != DEVICE, candidate.weights, kept
        if key not in self._known:
            self._known[key] = self._layers(self._prefilled_group(tokens, looked_at, read, kept))
        return self._known[key]

    def _rounded_share(self, kept: float) -> float:
        return round(kept * self._kept_grades) / self._kept_grades

    def intake_s(self, count: int) -> float:
        """Return the seconds of the intake of so many requests, which make a prefill group."""
        return self._costs.step.group_s + self._costs.step.sequence_s * count

    def restore(self, tokens: float) -> PassTime:
        """Return the time of bringing the KV of so many tokens, of all layers, from the store to the device."""
        seconds = tokens * self._model.kv_layer_bytes * self._model.num_layers / self._rate("copy")
        return PassTime.of(COPIES, seconds, COPIES)

    def new_memory(self, tokens: float) -> PassTime:
        """Return the time in which the kernel first provides memory for the KV of so many tokens, of all layers.

        A batch pays for it once, unless one before it has. Nothing where the rate was not measured.
        """
        rate = self._costs.rates.get("new memory")
        seconds = tokens * self._model.kv_layer_bytes * self._model.num_layers / rate if rate else 0.0
        return PassTime.of(NEW_MEMORY, seconds, OVERHEAD)

    def decode_layer(self, rows: int, context: float, kind: str, kept: float = 0.0) -> LayerWork:
        """Return the work of a layer of a kind in a decode step of so many sequences of so many tokens of KV."""
        group = self._decoded_group(rows, context, kept)
        return self._layer(group, kind, group.calls)

    def prefill_layer(self, lengths: Sequence[int], kind: str, kept: float = 0.0) -> LayerWork:
        """Return the work of a layer of a kind, not the last, in a prefill group of prompts of these lengths."""
        looked_at = sum(length * (length + 1) // 2 for length in lengths)
        group = self._prefilled_group(sum(lengths), looked_at, len(lengths), kept)
        return self._layer(group, kind, group.calls)

    def _decode(self, rows: int, context: int, kept: float) -> PassTime:
        time = self._layers(self._decoded_group(rows, context, kept))
        step = self._costs.step
        time.parts[STEP] += step.decode.at(rows) + step.further_layers_s
        _add(time.bounds, step.decode.bounds(rows), 1)
        time.bounds[OVERHEAD] += step.further_layers_s
        return time

    def _prefilled_group(self, tokens: int, looked_at: float, read: int, kept: float) -> _Group:
        spans = [end - start for start, end in row_spans(tokens, self._candidate.b_attn_prefill)]
        return _Group(
            attention=self._costs.prefill_attention,
            spans=[(rows, looked_at * rows / tokens) for rows in spans],
            fused=self._fused(decode=False),
            read=read,
            offloads=self._candidate.kv != DEVICE,
            kept=kept,
        )

    def _decoded_group(self, rows: int, context: float, kept: float) -> _Group:
        spans = [end - start for start, end in row_spans(rows, self._candidate.b_attn_decode)]
        return _Group(
            attention=self._costs.decode_attention,
            spans=[(span, span * (context + 1.0)) for span in spans],
            fused=self._fused(decode=True),
            read=rows,
            restores=self._candidate.kv == STREAMED,
            kept=kept,
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
        # All sub-batches but the last are alike, and so are their calls.
        spans = Counter(group.spans)
        for kind, count, rows_of_calls in self._calls_by_layer(group):
            work, calls = self._layer(group, kind, rows_of_calls), Counter(rows_of_calls)
            router, experts = self._costs.router[kind], self._costs.experts[kind]
            time = layer_time(work)
            parts["attention"] += count * sum(sub.attention.seconds for sub in work.sub_batches)
            parts["router"] += count * sum(times * router.at(rows) for rows, times in calls.items())
            parts["experts"] += count * sum(times * experts.at(rows) for rows, times in calls.items())
            waits_for = WEIGHTS if work.fetch is not NOTHING and time.bottleneck == FETCH else COPIES
            for part, seconds in ((waits_for, time.waits_s), (EXCHANGE, work.exchange.seconds)):
                parts[part] += count * seconds
                bounds[EXCHANGE if part == EXCHANGE else COPIES] += count * seconds
            for (rows, looked_at), times in spans.items():
                _add(bounds, group.attention.bounds(rows, looked_at), count * times)
            for rows, times in calls.items():
                _add(bounds, router.bounds(rows), count * times)
                _add(bounds, experts.bounds(rows), count * times)
            bottlenecks[time.bottleneck] += count * time.seconds
            hideable_s += count * time.hideable_s
        bottleneck = max(bottlenecks, key=bottlenecks.__getitem__)
        return PassTime(parts=parts, bounds=bounds, bottleneck=bottleneck, hideable_s=hideable_s)

    def _calls_by_layer(self, group: _Group) -> list[tuple[str, int, list[int]]]:
        """Return the layers that are alike: their kind, their number, and the rows of each of their expert calls."""
        layers, calls = dict(self._model.layers), group.calls
        if group.read == sum(calls):
            return [(kind, count, calls) for kind, count in layers.items()]
        last = self._model.last_kind
        layers[last] -= 1
        return [*((kind, count, calls) for kind, count in layers.items() if count), (last, 1, [max(group.read, 1)])]

    def _layer(self, group: _Group, kind: str, calls: list[int]) -> LayerWork:
        """Return the work of a layer with expert calls of so many rows."""
        router, experts = self._costs.router[kind], self._costs.experts[kind]
        called = {rows: Work(seconds=router.at(rows) + experts.at(rows)) for rows in set(calls)}
        by_sub_batch = group.fused and calls == group.calls
        subs = {
            (rows, looked_at): SubBatch(
                attention=Work(seconds=group.attention.at(rows, looked_at)),
                write=Work(num_bytes=rows * self._model.hidden_bytes),
                restore=self._copied(looked_at) if group.restores else NOTHING,
                offload=self._copied(rows) if group.offloads else NOTHING,
                experts=called[rows] if by_sub_batch else NOTHING,
            )
            for rows, looked_at in set(group.spans)
        }
        return LayerWork(
            sub_batches=[subs[span] for span in group.spans],
            experts=NOTHING if by_sub_batch else called[calls[0]],
            exchange=self._exchanged(kind, calls),
            fetch=self._fetched(kind, sum(group.calls), group.kept),
            fetches_ahead=self._reads_ahead(group.calls[-1]),
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

    def _fetched(self, kind: str, rows: int, kept: float) -> Work:
        """Return the fetch of the experts that so many rows reach, but for those that are kept.

        The MLP of a dense layer stays in memory. Rows choose kept experts as often as others.
        """
        if self._candidate.weights == RESIDENT or kind == DENSE or kept >= 1:
            return NOTHING
        model = self._model
        num_bytes = (1 - kept) * model.experts_reached(rows) * (model.stored_expert_bytes or model.expert_bytes_each)
        return Work(seconds=num_bytes / self._rate("disk"), num_bytes=num_bytes)

    def _reads_ahead(self, rows: int) -> bool:
        """Return whether an engine reads a layer's experts before so many rows have chosen them."""
        return bool(self._model.experts) and read_ahead_pays(rows, top_k=self._model.top_k, experts=self._model.experts)

    def _rate(self, name: str) -> float:
        rate = self._costs.rates.get(name)
        assert rate, f"candidates that need the rate of {name} are left out where it was not measured"
        return rate


def _add(bounds: defaultdict[str, float], more: Mapping[str, float], times: int) -> None:
    for name, seconds in more.items():
        bounds[name] += times * seconds


def _rounded_rows(rows: int, bits: int) -> int:
    """Return the number to so many leading bits. Powers of two, as most limits are, stay exact."""
    step = 1 << max(rows.bit_length() - bits, 0)
    return (rows + step // 2) // step * step


def _rounded(number: float, share: float) -> int:
    """Return the nearest of few numbers, each of which is larger than the one before by this share."""
    return max(1, round(math.exp(round(math.log(max(number, 1)) / share) * share)))
