"""Predicts the seconds of a pass of ranks in lockstep on a cluster, by part: a roofline, and what engines add to it.

A pass lasts as long as that of its busiest rank. Nothing of it is measured; `sources` says where each part is from.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from sgl_batch.planner.candidate import DEVICE, STREAMED
from sgl_batch.planner.layer_dag import EXCHANGE
from sgl_batch.planner.layouts import Layout, kv_parts, rank_layers
from sgl_batch.planner.model_layers import MOE
from sgl_batch.planner.pass_cost import COPIES, STEP, WEIGHTS, PassTime
from sgl_batch.planner.roofline import COMPUTE, MEMORY, OVERHEAD
from sgl_batch.planner.sheet_costs import DATA_SHEET
from sgl_batch.simulator.cluster.assumed import ASSUMED
from sgl_batch.simulator.cluster.engine_settings import EngineSettings
from sgl_batch.simulator.cluster.exchange_cost import NO_EXCHANGE, ExchangeCost, ExchangeTime
from sgl_batch.simulator.cluster.expert_cost import NO_EXPERTS, ExpertCost, ExpertTime
from sgl_batch.simulator.cluster.hardware import Cluster
from sgl_batch.simulator.cluster.models import ITEM_BYTES, ClusterModel
from sgl_batch.simulator.cluster.rates import Rates, rates_of
from sgl_batch.simulator.cluster.regime import DATA_PARALLEL, HOST, Regime
from sgl_batch.simulator.work import PassWork

ATTENTION, MATRICES, EXPERTS, SHARED, ROUTER, LOGITS = "attention", "matrices", "experts", "shared", "router", "logits"
TILES, SKEW, LAUNCHES, AGREEMENT, HOST_ATTENTION = "tiles", "skew", "launches", "agreement", "attention on the host"
ROWS = "rows in memory"
# Of a number of the key that passes are remembered by: so many significant bits, rounded up by less than a percent.
_KEY_BITS = 8
_DETAILED = f"{DATA_SHEET}, times shares that are {ASSUMED}"


@dataclass(slots=True)
class _Sums:
    """Seconds so far: by part, and by what bounds them."""

    parts: defaultdict[str, float]
    bounds: defaultdict[str, float]

    def add(self, part: str, bound: str, seconds: float) -> None:
        if seconds:
            self.parts[part] += seconds
            self.bounds[bound] += seconds

    def add_longer(self, part: str, memory_s: float, compute_s: float, times: float) -> float:
        """Add the longer of two times that overlap, and return it."""
        seconds = max(memory_s, compute_s)
        self.add(part, MEMORY if memory_s >= compute_s else COMPUTE, times * seconds)
        return seconds

    def add_matrix(
        self, part: str, rates: Rates, num_bytes: float, number_bytes: float, rows: float, times: int
    ) -> float:
        """Add matrices of so many bytes, times so many rows, so many times; return the seconds of one time."""
        memory_s, compute_s = rates.matrix_s(num_bytes, number_bytes, rows)
        seconds = rates.together(memory_s, compute_s)
        self.add(part, MEMORY if memory_s >= compute_s else COMPUTE, times * seconds)
        return seconds


class ClusterCosts:
    """Seconds of what one instance of a deployment does; fulfils simulator.work.Costs.

    Args:
        model: The model.
        cluster: Where it runs.
        engine: What runs it.
        layout: The ranks of an instance.
        regime: Where weights, KV and attention lie.
    """

    def __init__(
        self, model: ClusterModel, cluster: Cluster, engine: EngineSettings, layout: Layout, regime: Regime
    ) -> None:
        self.sources: Mapping[str, str] = {
            **dict.fromkeys((ATTENTION, MATRICES, EXPERTS, SHARED, ROUTER, LOGITS, ROWS), _DETAILED),
            **dict.fromkeys((WEIGHTS, COPIES, EXCHANGE, HOST_ATTENTION), _DETAILED),
            **dict.fromkeys((TILES, SKEW, LAUNCHES, AGREEMENT, STEP), ASSUMED),
        }
        self._model, self._engine, self._layout, self._regime = model.layers, engine, layout, regime
        self._mine = rank_layers(model.layers, layout) if layout.tensor else model.layers
        self._rates = rates_of(cluster, engine, layout)
        is_sliced = layout.tensor or engine.tensor_experts
        self._experts = ExpertCost(model.layers, engine, self._rates, ranks=layout.ranks, is_sliced=is_sliced)
        self._exchange = ExchangeCost(model.layers, engine, self._rates, ranks=layout.ranks)
        self._spans_cluster = cluster.gpus > cluster.node_gpus
        self._kv_token_bytes = model.kv_token_bytes / kv_parts(model.layers, layout)
        self._moe_layers = max(model.layers.layers.get(MOE, 0), 1)
        self._known: dict[tuple[int, ...], PassTime] = {}

    @property
    def rates(self) -> Rates:
        """Return the rates of one rank."""
        return self._rates

    def of_pass(self, work: PassWork) -> PassTime:
        """Return the time of a forward pass of all ranks, with what surrounds its layers."""
        key = (
            _up(work.prompts),
            _up(work.prompt_tokens),
            _up(work.prompt_pairs),
            _up(work.rows),
            _up(work.kv_tokens),
            _up(work.all_rows),
            int(work.streams),
        )
        found = self._known.get(key)
        if found is None:
            prompts, tokens, pairs, rows, kv_tokens, all_rows, streams = key
            found = self.of_exactly(
                PassWork(
                    prompts=prompts,
                    prompt_tokens=tokens,
                    prompt_pairs=pairs,
                    rows=rows,
                    kv_tokens=kv_tokens,
                    all_rows=all_rows,
                    streams=bool(streams),
                )
            )
            self._known[key] = found
        return found

    def of_copy(self, tokens: float) -> PassTime:
        """Return the time of copying the KV of so many tokens, of all layers, between a rank's device and the store."""
        return _only(COPIES, tokens * self._kv_token_bytes / self._rates.link)

    def of_move(self, tokens: float) -> PassTime:
        """Return the time of moving the KV of so many tokens from one rank to another, over the slowest way."""
        rate = self._rates.network if self._spans_cluster else self._rates.nvlink
        return _only(COPIES, tokens * self._kv_token_bytes / rate)

    def of_exactly(self, work: PassWork) -> PassTime:
        """Return the time of a pass, without rounding and without remembering it."""
        sums, engine = _Sums(defaultdict(float), defaultdict(float)), self._engine
        for kind, count in self._model.layers.items():
            self._add_layer(sums, work, kind, count)
        tokens = work.prompt_tokens + work.rows
        answered = work.prompts + work.rows
        sums.add_matrix(LOGITS, self._rates, self._mine.head_bytes, ITEM_BYTES, answered, 1)
        if tokens:
            sums.add(STEP, OVERHEAD, engine.step_s.best + engine.step_row_s.best * answered)
            sums.add(AGREEMENT, OVERHEAD, engine.agree_s.best if self._layout.ranks > 1 else 0.0)
        bottleneck = max(sums.parts, key=sums.parts.__getitem__) if sums.parts else STEP
        return PassTime(parts=sums.parts, bounds=sums.bounds, bottleneck=bottleneck)

    def _add_layer(self, sums: _Sums, work: PassWork, kind: str, count: int) -> None:
        """Add so many layers of a kind."""
        mine, rates, tokens = self._mine, self._rates, work.prompt_tokens + work.rows
        device_s = sums.add_matrix(MATRICES, rates, mine.attention_bytes, mine.weight_bytes, tokens, count)
        device_s += self._add_attention(sums, work, count)
        experts = NO_EXPERTS
        if kind == MOE:
            device_s += sums.add_matrix(ROUTER, rates, mine.router_bytes, ITEM_BYTES, tokens, count)
            device_s += sums.add_matrix(SHARED, rates, mine.shared_bytes, mine.weight_bytes, tokens, count)
            experts = self._expert_time(work)
            sums.add(EXPERTS, MEMORY if experts.memory_s >= experts.compute_s else COMPUTE, count * experts.work_s)
            sums.add(TILES, COMPUTE, count * experts.tiles_s)
            sums.add(SKEW, COMPUTE, count * experts.skew_s)
            sums.add(LAUNCHES, OVERHEAD, count * experts.calls_s)
            device_s += experts.seconds
        else:
            device_s += sums.add_matrix(SHARED, rates, mine.dense_bytes, mine.weight_bytes, tokens, count)
        device_s += self._add_row_passes(sums, work, kind, count)
        exchange = self._exchange_time(work, kind)
        sums.add(EXCHANGE, EXCHANGE, count * exchange.seconds)
        device_s += exchange.seconds
        launches_s = self._launches_s(work, device_s)
        sums.add(LAUNCHES, OVERHEAD, count * launches_s)
        self._add_waits(sums, work, kind, experts, device_s + launches_s, count)

    def _add_row_passes(self, sums: _Sums, work: PassWork, kind: str, count: int) -> float:
        """Add what reads and writes rows in device memory beside matrices; return the seconds of one layer."""
        engine, model, tokens = self._engine, self._model, work.prompt_tokens + work.rows
        passes = engine.row_passes.best * tokens
        if kind == MOE:
            mine = tokens if self._is_alone(work) else max(work.all_rows, tokens) / self._layout.ranks
            passes += engine.choice_passes.best * model.top_k * mine
        seconds = passes * model.hidden_bytes / self._rates.memory
        sums.add(ROWS, MEMORY, count * seconds)
        return seconds

    def _add_attention(self, sums: _Sums, work: PassWork, count: int) -> float:
        """Add the device's attention of so many layers; return the seconds of one, with windows counted on average."""
        model, rates = self._mine, self._rates
        pairs, looked_at = self._seen(work)
        prompts_s = pairs * model.prefill_flop / rates.attention
        # Its keys and values are written once and read at least once.
        sums.add(ATTENTION, COMPUTE, count * prompts_s)
        if self._regime.attention == HOST:
            return prompts_s
        memory_s = looked_at * model.kv_layer_bytes / rates.memory
        return prompts_s + sums.add_longer(ATTENTION, memory_s, looked_at * model.decode_flop / rates.attention, count)

    def _seen(self, work: PassWork) -> tuple[float, float]:
        """Return pairs of prompts, and tokens that decoded rows look at, of a layer on average over its windows."""
        model = self._model
        if not model.window_layers:
            return work.prompt_pairs, work.kv_tokens
        share = model.window_layers / model.num_layers
        pairs = min(work.prompt_pairs, work.prompt_tokens * model.window)
        looked_at = min(work.kv_tokens, work.rows * model.window)
        return (
            share * pairs + (1 - share) * work.prompt_pairs,
            share * looked_at + (1 - share) * work.kv_tokens,
        )

    def _is_alone(self, work: PassWork) -> bool:
        """Return whether each rank computes its rows with all experts: prefill in the data-parallel form."""
        return self._regime.prefill == DATA_PARALLEL and work.prompt_tokens > 0 and work.rows == 0

    def _expert_time(self, work: PassWork) -> ExpertTime:
        tokens = work.prompt_tokens + work.rows
        if self._is_alone(work):
            return self._experts.alone(tokens)
        return self._experts.shared(tokens if self._layout.tensor else max(work.all_rows, tokens))

    def _exchange_time(self, work: PassWork, kind: str) -> ExchangeTime:
        tokens = work.prompt_tokens + work.rows
        if self._layout.tensor:
            return self._exchange.of_sums(tokens)
        if kind != MOE or self._is_alone(work):
            return NO_EXCHANGE
        return self._exchange.of_rows(tokens, max(work.all_rows, tokens), decodes_alone=not work.prompt_tokens)

    def _launches_s(self, work: PassWork, device_s: float) -> float:
        """Return what launching a layer adds: gaps between kernels, and what the host takes longer than the device."""
        engine, rows = self._engine, work.prompt_tokens + work.rows
        if not rows:
            return 0.0
        is_captured = rows <= engine.graph_rows and (not work.prompt_tokens or engine.mixed_graphs)
        waits_s = 0.0 if is_captured else max(0.0, engine.launch_s.best - device_s)
        return max(engine.layer_s.best, waits_s)

    def _add_waits(
        self, sums: _Sums, work: PassWork, kind: str, experts: ExpertTime, device_s: float, count: int
    ) -> None:
        """Add what a layer waits for host memory and the host, beyond what the device's work hides.

        Both directions of the link work at once. Of what goes on at one time, `overlap` of all but the longest hides.
        """
        rates, regime = self._rates, self._regime
        tokens = work.prompt_tokens + work.rows
        _, looked_at = self._seen(work)
        kv_bytes = self._kv_token_bytes / self._model.num_layers
        weights_s = self._fetched_bytes(work, kind, experts) / rates.link
        is_streamed = (regime.kv == STREAMED or work.streams) and regime.attention == DEVICE
        brought = looked_at * kv_bytes if is_streamed else 0.0
        stored = tokens * kv_bytes if regime.has_store else 0.0
        host_s = 0.0
        if regime.attention == HOST and work.rows:
            host_s = max(looked_at * kv_bytes / rates.host_memory, looked_at * self._mine.decode_flop / rates.host_flop)
            brought += 2 * work.rows * self._model.hidden_bytes
        copies_s = brought / rates.link
        copies_s = max(copies_s, stored / rates.link - weights_s)
        if not (weights_s or copies_s or host_s):
            return
        link_s = weights_s + copies_s
        longest = max(device_s, link_s, host_s)
        whole = longest + (1 - self._engine.overlap.best) * (device_s + link_s + host_s - longest)
        share = (whole - device_s) / (link_s + host_s)
        sums.add(WEIGHTS, COPIES, count * share * weights_s)
        sums.add(COPIES, COPIES, count * share * copies_s)
        sums.add(HOST_ATTENTION, HOST_ATTENTION, count * share * host_s)

    def _fetched_bytes(self, work: PassWork, kind: str, experts: ExpertTime) -> float:
        """Return the bytes of a layer's weights that come from host memory in a pass."""
        model, streamed, ranks = self._model, self._regime.streamed_weights, self._layout.ranks
        if not work.prompt_tokens + work.rows:
            return 0.0
        attention = streamed * self._mine.attention_bytes if self._engine.by_layer else 0.0
        if kind != MOE:
            return attention
        if self._is_alone(work):
            # What the rank has for decode stays where it is.
            resident = (1 - streamed) * model.experts / ranks
            return attention + max(experts.reached - resident, 0.0) * model.expert_bytes_each
        pieces = ranks if self._layout.tensor or self._engine.tensor_experts else 1
        asked = model.experts * pieces / ranks if self._engine.by_layer else experts.reached
        return attention + streamed * asked * model.expert_bytes_each / pieces


def _only(part: str, seconds: float) -> PassTime:
    parts = defaultdict[str, float](float, {part: seconds})
    return PassTime(parts=parts, bounds=defaultdict(float, {COPIES: seconds}), bottleneck=part)


def _up(number: int) -> int:
    """Return the number with its significant bits alone, rounded up."""
    drop = number.bit_length() - _KEY_BITS
    return (-(-number >> drop)) << drop if drop > 0 else number
