"""Owns what fits: the KV tokens that a rank holds on its device and in host memory, after weights and reserves."""

from __future__ import annotations

from dataclasses import dataclass

from sgl_batch.byte_sizes import format_bytes
from sgl_batch.errors import ConfigError
from sgl_batch.planner.layouts import Layout, kv_parts
from sgl_batch.simulator.cluster.engine_settings import EngineSettings
from sgl_batch.simulator.cluster.hardware import Cluster
from sgl_batch.simulator.cluster.models import ClusterModel
from sgl_batch.simulator.cluster.regime import DATA_PARALLEL, Regime

# A rank must hold the KV of so many tokens on its device: a prompt of a usual length, or a layer's worth of staging.
LEAST_TOKENS = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory:
    """Bytes of a rank's device and of its share of a node's memory, and the tokens of KV that are left room for.

    Attributes:
        total: Device memory as the driver reports it.
        weights: Weights on the device.
        reserve: What else the engine takes of it.
        kv_token: KV of a token on one device, in the layers that keep all tokens.
        kv_sequence: KV of a sequence on one device in the layers that keep a window of it; 0 where all keep all.
        device_tokens: Tokens of KV on the device, before any sequence has taken `kv_sequence` of it.
        host_weights: Weights in a node's memory.
        store_tokens: Tokens of KV in host memory; 0 without a store.
    """

    total: float
    weights: float
    reserve: float
    kv_token: float
    kv_sequence: float
    device_tokens: int
    host_weights: float
    store_tokens: int


def rank_memory(
    model: ClusterModel, cluster: Cluster, engine: EngineSettings, layout: Layout, regime: Regime
) -> RankMemory:
    """Return the memory of one rank. Raises ConfigError where weights, or the least KV, do not fit.

    Ranks with attention of their own have all weights but the routed experts each (docs/ranks.md). Tensor parallel
    ranks share all weights, and the KV of a sequence as far as it has heads; latent KV is whole on each.
    """
    total = cluster.sheet.usable_bytes
    weights = device_weights(model, engine, layout, regime)
    reserve = engine.reserve_bytes.best
    if layout.ranks > 1 and not layout.tensor:
        reserve += engine.ranks_reserve_bytes.best
    kv_token, kv_sequence = (size / kv_parts(model.layers, layout) for size in kv_bytes(model, engine))
    left = total - weights - reserve
    tokens = int(left // kv_token) if left > 0 else 0
    if tokens < LEAST_TOKENS:
        raise ConfigError(
            f"{model.title} on {cluster.name}: a GPU has {format_bytes(int(total))}, of which weights take "
            f"{format_bytes(int(weights))} and the engine {format_bytes(int(reserve))}, which leaves {tokens:,} "
            f"tokens of KV; {LEAST_TOKENS:,} are needed: take more GPUs for an instance, or stream weights"
        )
    host_weights = _host_weights(model, engine, regime)
    return RankMemory(
        total=total,
        weights=weights,
        reserve=reserve,
        kv_token=kv_token,
        kv_sequence=kv_sequence,
        device_tokens=tokens,
        host_weights=host_weights,
        store_tokens=_store_tokens(model, cluster, engine, layout, host_weights) if regime.has_store else 0,
    )


def kv_bytes(model: ClusterModel, engine: EngineSettings) -> tuple[float, float]:
    """Return the bytes of KV of a token in all layers that keep it, and of a sequence in those that keep a window.

    A sequence is taken to be as long as the window. Of a model without any other layer all keep all tokens.
    """
    layers = model.layers
    if engine.keeps_windows or layers.window_layers == layers.num_layers:
        return model.kv_token_bytes, 0.0
    return model.kv_token_bytes - model.window_token_bytes, layers.window * model.window_token_bytes


def device_weights(model: ClusterModel, engine: EngineSettings, layout: Layout, regime: Regime) -> float:
    """Return the bytes of weights on the device of one rank."""
    resident = 1 - regime.streamed_weights
    others = model.other_bytes / layout.ranks if layout.tensor else model.other_bytes
    if engine.by_layer:
        layers = model.layers.num_layers * model.layers.attention_bytes / (layout.ranks if layout.tensor else 1)
        others -= regime.streamed_weights * layers
    return others + resident * model.expert_bytes / layout.ranks


def least_streamed(
    model: ClusterModel, cluster: Cluster, engine: EngineSettings, layout: Layout, steps: int = 16
) -> float | None:
    """Return the least share of the experts, in so many steps, that must be streamed; None where no share helps."""
    for step in range(steps + 1):
        try:
            rank_memory(model, cluster, engine, layout, Regime(streamed_weights=step / steps))
        except ConfigError:
            continue
        return step / steps
    return None


def _host_weights(model: ClusterModel, engine: EngineSettings, regime: Regime) -> float:
    """Return the bytes of weights that a node keeps: all experts, where any of them are streamed in any phase."""
    if not regime.streamed_weights and regime.prefill != DATA_PARALLEL:
        return 0.0
    layers = model.layers.num_layers * model.layers.attention_bytes if engine.by_layer else 0.0
    return model.expert_bytes + layers


def _store_tokens(
    model: ClusterModel, cluster: Cluster, engine: EngineSettings, layout: Layout, host_weights: float
) -> int:
    """Return the tokens of KV in host memory of a rank; of tensor parallel ranks, of the instance.

    Latent KV of tensor parallel ranks on several nodes is in each of them.
    """
    node = cluster.host_memory_bytes - host_weights - engine.host_reserve_bytes.best
    if node <= 0:
        raise ConfigError(
            f"{model.title} on {cluster.name}: a node has {format_bytes(int(cluster.host_memory_bytes))}, and weights "
            f"in it take {format_bytes(int(host_weights))}, which leaves nothing for KV; keep KV on the devices"
        )
    share = node / cluster.node_gpus
    if layout.tensor:
        nodes = max(1.0, layout.ranks / cluster.node_gpus)
        share *= layout.ranks / (nodes if kv_parts(model.layers, layout) == 1 else 1.0)
    return int(share // model.kv_token_bytes)
