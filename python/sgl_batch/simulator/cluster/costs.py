"""Predicts the seconds of a pass of ranks in lockstep on a cluster, by part: a roofline, and what engines add to it.

A pass lasts as long as that of its busiest rank. Nothing of it is measured; `sources` says where each part is from.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace

from sgl_batch.planner.layer_dag import EXCHANGE
from sgl_batch.planner.layouts import Layout, kv_parts, rank_layers
from sgl_batch.planner.model_layers import MOE
from sgl_batch.planner.pass_cost import COPIES, STEP, WEIGHTS, PassTime
from sgl_batch.planner.roofline import COMPUTE, MEMORY, OVERHEAD, Knots
from sgl_batch.planner.sheet_costs import DATA_SHEET
from sgl_batch.simulator.cluster.assumed import ASSUMED
from sgl_batch.simulator.cluster.capacity import kv_bytes
from sgl_batch.simulator.cluster.engine_settings import EngineSettings
from sgl_batch.simulator.cluster.exchange_cost import NO_EXCHANGE, ExchangeCost, ExchangeTime
from sgl_batch.simulator.cluster.expert_cost import NO_EXPERTS, ExpertCost, ExpertTime
from sgl_batch.simulator.cluster.hardware import Cluster
from sgl_batch.simulator.cluster.host_link import HostLink
from sgl_batch.simulator.cluster.measured import MeasuredModules
from sgl_batch.simulator.cluster.models import ITEM_BYTES, ClusterModel
from sgl_batch.simulator.cluster.rates import Rates, rates_of
from sgl_batch.simulator.cluster.regime import DATA_PARALLEL, HOST, Regime
from sgl_batch.simulator.work import PARTITION, PassWork

ATTENTION, MATRICES, EXPERTS, SHARED, ROUTER, LOGITS = "attention", "matrices", "experts", "shared", "router", "logits"
TILES, SKEW, LAUNCHES, AGREEMENT, HOST_ATTENTION = "tiles", "skew", "launches", "agreement", "attention on the host"
BOUNDARY = "boundary"
ROWS = "rows in memory"
# Of a number of the key that passes are remembered by: so many significant bits, rounded up by less than a percent.
_KEY_BITS = 8
# Of the products that long prompts reach in attention, those of shorter ones: tiles on the diagonal are not full.
_LENGTH_SHARE = Knots(((64.0, 0.25), (256.0, 0.45), (1024.0, 0.75), (4096.0, 0.95), (8192.0, 1.0)))
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
        measured: Seconds of measured kernels, which count where they have an entry; None for the roofline alone.
    """

    def __init__(
        self,
        model: ClusterModel,
        cluster: Cluster,
        engine: EngineSettings,
        layout: Layout,
        regime: Regime,
        measured: MeasuredModules | None = None,
    ) -> None:
        # Tables have no slices of matrices, of which tensor parallel ranks have one each.
        self._measured = None if layout.tensor or engine.tensor_experts else measured
        kernels = f"{self._measured.tables.name} as far as they go, else {_DETAILED}" if self._measured else _DETAILED
        self.sources: Mapping[str, str] = {
            **dict.fromkeys((ATTENTION, MATRICES, EXPERTS), kernels),
            **dict.fromkeys((SHARED, ROUTER, LOGITS, ROWS), _DETAILED),
            **dict.fromkeys((WEIGHTS, COPIES, EXCHANGE, HOST_ATTENTION), _DETAILED),
            **dict.fromkeys((TILES, SKEW, LAUNCHES, AGREEMENT, STEP, BOUNDARY, PARTITION), ASSUMED),
        }
        self._model, self._engine, self._layout, self._regime = model.layers, engine, layout, regime
        self._mine = rank_layers(model.layers, layout) if layout.tensor else model.layers
        self._rates = rates_of(cluster, engine, layout)
        is_sliced = layout.tensor or engine.tensor_experts
        self._experts = ExpertCost(model.layers, engine, self._rates, ranks=layout.ranks, is_sliced=is_sliced)
        self._exchange = ExchangeCost(model.layers, engine, self._rates, ranks=layout.ranks)
        self._spans_cluster = cluster.gpus > cluster.node_gpus
        self._kv_token_bytes = kv_bytes(model, engine)[0] / kv_parts(model.layers, layout)
        kv_layer_bytes = model.layers.kv_layer_bytes / kv_parts(model.layers, layout)
        self._link = HostLink(model.layers, self._mine, engine, layout, regime, self._rates, kv_layer_bytes)
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

    def of_boundary(self) -> PassTime:
        """Return the time in which all ranks agree on what follows a boundary; one rank has nothing to agree on."""
        return PassTime.of(BOUNDARY, self._engine.boundary_s.best if self._layout.ranks > 1 else 0.0, OVERHEAD)

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
        device_s = self._add_attention_matrices(sums, tokens, count)
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
        _, looked_at = self._seen(work)
        waits = self._link.waits(work, kind, experts, looked_at, device_s + launches_s, alone=self._is_alone(work))
        sums.add(WEIGHTS, COPIES, count * waits.weights_s)
        sums.add(COPIES, COPIES, count * waits.copies_s)
        sums.add(HOST_ATTENTION, HOST_ATTENTION, count * waits.host_s)

    def _add_attention_matrices(self, sums: _Sums, tokens: int, count: int) -> float:
        """Add the matrices of attention of so many layers; return the seconds of one."""
        mine = self._mine
        measured_s = self._measured.matrices_s(tokens) if self._measured else None
        if measured_s is None:
            return sums.add_matrix(MATRICES, self._rates, mine.attention_bytes, mine.weight_bytes, tokens, count)
        memory_s, compute_s = self._rates.matrix_s(mine.attention_bytes, mine.weight_bytes, tokens)
        sums.add(MATRICES, MEMORY if memory_s >= compute_s else COMPUTE, count * measured_s)
        return measured_s

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
        length = max(2 * pairs / work.prompt_tokens, 1.0) if work.prompt_tokens else 1.0
        prompts_s = pairs * model.prefill_flop / (rates.attention * _LENGTH_SHARE.at(length))
        memory_s, compute_s = looked_at * model.kv_layer_bytes / rates.memory, looked_at * model.decode_flop
        compute_s /= rates.attention
        decode_s = max(memory_s, compute_s)
        if self._measured:
            prompts_s = self._measured.prompts_s(work.prompt_tokens, pairs) or prompts_s
            decode_s = self._measured.decode_s(work.rows, looked_at) or decode_s
        sums.add(ATTENTION, COMPUTE, count * prompts_s)
        if self._regime.attention == HOST:
            return prompts_s
        sums.add(ATTENTION, MEMORY if memory_s >= compute_s else COMPUTE, count * decode_s)
        return prompts_s + decode_s

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
        tokens, alone = work.prompt_tokens + work.rows, self._is_alone(work)
        rows = tokens if alone or self._layout.tensor else max(work.all_rows, tokens)
        time = self._experts.alone(rows) if alone else self._experts.shared(rows)
        measured_s = self._measured.experts_s(rows, alone=alone) if self._measured and rows else None
        # A kernel's time has its tiles in it; uneven choices add as much as the roofline says.
        return time if measured_s is None else replace(time, work_s=measured_s, tiles_s=0.0)

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
        # Far more rows than the busiest rank's decoded ones times the ranks are prompts of other ranks.
        has_prompts = bool(work.prompt_tokens) or work.all_rows > 2 * rows * self._layout.ranks
        is_captured = rows <= engine.graph_rows and (engine.mixed_graphs or not has_prompts)
        waits_s = 0.0 if is_captured else max(0.0, engine.launch_s.best - device_s)
        return max(engine.layer_s.best, waits_s)


def _only(part: str, seconds: float) -> PassTime:
    parts = defaultdict[str, float](float, {part: seconds})
    return PassTime(parts=parts, bounds=defaultdict(float, {COPIES: seconds}), bottleneck=part)


def _up(number: int) -> int:
    """Return the number with its significant bits alone, rounded up."""
    drop = number.bit_length() - _KEY_BITS
    return (-(-number >> drop)) << drop if drop > 0 else number
