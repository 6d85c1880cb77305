"""Predicts the seconds of a forward pass of a candidate plan, by part, from the cost model and the layer's graph."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from sgl_batch.core.plan import row_spans
from sgl_batch.planner.candidate import DEVICE, RESIDENT, STREAMED, Candidate
from sgl_batch.planner.cost_model import AttentionCost, CostModel
from sgl_batch.planner.layer_dag import FETCH, NOTHING, LayerTime, LayerWork, SubBatch, Work, layer_time
from sgl_batch.planner.model_layers import DENSE, MOE, ModelLayers

STEP, INTAKE, COPIES, WEIGHTS = "step", "intake", "copies", "weights"
_CACHED_SHARE = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class PassTime:
    """Seconds of a pass by part, and what most of the layers' critical path is."""

    parts: defaultdict[str, float]
    bottleneck: str

    @property
    def seconds(self) -> float:
        """Return the seconds of the whole pass."""
        return sum(self.parts.values())


class PassCost:
    """Seconds of the passes of one candidate; equal questions are answered from memory.

    Args:
        costs: The fitted profile.
        model: The model.
        candidate: Its limits.
        cores: Of the machine, where copies take them from computation; 0 on a GPU.
    """

    def __init__(self, costs: CostModel, model: ModelLayers, candidate: Candidate, *, cores: int) -> None:
        self._costs, self._model, self._candidate = costs, model, candidate
        self._copy_cores = 1 / cores if cores else 0.0
        self._decoded: dict[tuple[int, int], PassTime] = {}
        self._prefilled: dict[tuple[int, int, int], PassTime] = {}

    def decode(self, rows: int, context: float) -> PassTime:
        """Return the time of a decode step of so many sequences, with so many tokens of KV each on average."""
        key = rows, _rounded(context)
        if key not in self._decoded:
            self._decoded[key] = self._decode(*key)
        return self._decoded[key]

    def prefill(self, lengths: Sequence[int]) -> PassTime:
        """Return the time of a prefill group of prompts of these lengths, with the intake of their requests."""
        looked_at = sum(length * (length + 1) // 2 for length in lengths)
        key = sum(lengths), _rounded(looked_at), len(lengths)
        if key not in self._prefilled:
            self._prefilled[key] = self._prefill(*key)
        return self._prefilled[key]

    def _prefill(self, tokens: int, looked_at: int, sequences: int) -> PassTime:
        fused = self._fused(decode=False)
        spans = [end - start for start, end in row_spans(tokens, self._candidate.b_attn_prefill)]
        stored = self._candidate.kv != DEVICE
        time = self._layers(
            self._costs.prefill_attention,
            [(rows, looked_at * rows / tokens) for rows in spans],
            fused=fused,
            offloads=stored,
        )
        step = self._costs.step
        time.parts[INTAKE] += step.group_s + step.sequence_s * sequences
        return time

    def restore_s(self, tokens: float) -> float:
        """Return the seconds of bringing the KV of so many tokens, of all layers, from the store to the device."""
        return tokens * self._model.kv_layer_bytes * self._model.num_layers / self._rate("copy")

    def _decode(self, rows: int, context: int) -> PassTime:
        spans = [end - start for start, end in row_spans(rows, self._candidate.b_attn_decode)]
        streamed = self._candidate.kv == STREAMED
        time = self._layers(
            self._costs.decode_attention,
            [(span, span * (context + 1.0)) for span in spans],
            fused=self._fused(decode=True),
            restores=streamed,
        )
        time.parts[STEP] += self._costs.step.decode.at(rows)
        return time

    def _fused(self, *, decode: bool) -> bool:
        """Return whether each sub-batch has an expert call of its own (core/plan.make_plan)."""
        accumulate = self._candidate.accumulate
        dense = MOE not in self._model.layers
        return accumulate is False or (accumulate is None and dense and not decode)

    def _layers(
        self,
        attention: AttentionCost,
        spans: Sequence[tuple[int, float]],
        *,
        fused: bool,
        restores: bool = False,
        offloads: bool = False,
    ) -> PassTime:
        parts = defaultdict[str, float](float, attention=self._costs.pass_s * len(spans))
        bottlenecks = defaultdict[str, float](float)
        for kind, count in self._model.layers.items():
            attention_s = [attention.at(rows, looked_at) for rows, looked_at in spans]
            calls = [rows for rows, _ in spans] if fused else [sum(rows for rows, _ in spans)]
            router_s = [self._costs.router[kind].at(rows) for rows in calls]
            experts_s = [self._costs.experts[kind].at(rows) for rows in calls]
            subs = [
                SubBatch(
                    attention=Work(seconds=seconds),
                    write=Work(num_bytes=rows * self._model.hidden_bytes),
                    restore=self._copied(looked_at) if restores else NOTHING,
                    offload=self._copied(rows) if offloads else NOTHING,
                    experts=Work(seconds=router_s[index] + experts_s[index]) if fused else NOTHING,
                )
                for index, (seconds, (rows, looked_at)) in enumerate(zip(attention_s, spans, strict=True))
            ]
            fetch = self._fetched(kind, sum(calls))
            time = layer_time(
                LayerWork(
                    sub_batches=subs,
                    experts=NOTHING if fused else Work(seconds=router_s[0] + experts_s[0]),
                    fetch=fetch,
                    copy_cores=self._copy_cores,
                )
            )
            parts["attention"] += count * sum(attention_s)
            parts["router"] += count * sum(router_s)
            parts["experts"] += count * sum(experts_s)
            parts[_waits_for(time, fetch)] += count * time.waits_s
            bottlenecks[time.bottleneck] += count * time.seconds
        return PassTime(parts=parts, bottleneck=max(bottlenecks, key=bottlenecks.__getitem__))

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


def _waits_for(time: LayerTime, fetch: Work) -> str:
    return WEIGHTS if fetch is not NOTHING and time.bottleneck == FETCH else COPIES


def _rounded(number: float) -> int:
    """Return the number with an error of at most a few percent, so that few different questions are left."""
    grain = max(1, round(number * _CACHED_SHARE))
    return max(1, round(number / grain) * grain)
