"""The entry to this folder: what a model on a cluster costs and holds, in each layout and regime that fits.

`deployment` answers for one layout and regime, `feasible` lists all that an engine has and that fit. Which of them is
best is not decided here: a simulation of each tells.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from sgl_batch.errors import ConfigError
from sgl_batch.planner.candidate import DEVICE, STREAMED
from sgl_batch.planner.layouts import Layout, layouts
from sgl_batch.simulator.cluster.capacity import RankMemory, least_streamed, rank_memory
from sgl_batch.simulator.cluster.costs import ClusterCosts
from sgl_batch.simulator.cluster.engine_settings import EngineSettings
from sgl_batch.simulator.cluster.engines import engine_named
from sgl_batch.simulator.cluster.hardware import Cluster, cluster_named
from sgl_batch.simulator.cluster.measured import MeasuredModules, measured_modules
from sgl_batch.simulator.cluster.models import ClusterModel, model_named
from sgl_batch.simulator.cluster.regime import DATA_PARALLEL, Regime
from sgl_batch.simulator.work import Costs

# Shares of the experts that are streamed where more of them leave room for more KV.
_SHARES = (0.25, 0.5, 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """A model as an engine runs it on a cluster.

    Attributes:
        costs: Seconds of what one instance does.
        device_tokens: Tokens of KV on the device of a rank; of tensor parallel ranks, of the instance. See `for_rows`.
        store_tokens: Tokens of KV in host memory of a rank, or of such an instance; 0 without a store.
        ranks: Ranks of an instance that have sequences of their own: 1 where ranks are tensor parallel.
        instances: Instances, which share nothing.
        memory: The bytes behind the tokens.
    """

    model: ClusterModel
    cluster: Cluster
    engine: EngineSettings
    layout: Layout
    regime: Regime
    costs: Costs
    device_tokens: int
    store_tokens: int
    ranks: int
    instances: int
    memory: RankMemory

    @property
    def running_tokens(self) -> int:
        """Return the tokens of KV that sequences of a rank can have while they run."""
        return self.store_tokens if self.regime.runs_from_store else self.device_tokens

    @property
    def sequence_tokens(self) -> float:
        """Return the tokens whose room a sequence takes beside its own: for layers that keep a window of it."""
        return self.memory.kv_sequence / self.memory.kv_token

    def for_rows(self, rows: int) -> Deployment:
        """Return the deployment with room set apart for the windows of so many sequences."""
        apart = math.ceil(rows * self.sequence_tokens)
        return replace(self, device_tokens=max(self.device_tokens - apart, 0)) if apart else self

    def text(self) -> str:
        """Return the deployment in words."""
        return f"{self.engine.title}, {self.layout.text()} on {self.cluster.name}: {self.regime.text()}"


def deployment(
    model: str | ClusterModel,
    cluster: str | Cluster,
    engine: str | EngineSettings,
    layout: Layout | None = None,
    regime: Regime | None = None,
    *,
    tables: bool = True,
) -> Deployment:
    """Return what a model on a cluster costs and holds. Raises ConfigError for what does not fit, or is not here.

    `layout`: by default one instance with a rank on each GPU; `regime`: by default all on the device.
    `tables`: whether measured kernels count where a table of them is installed (kernel_tables).
    """
    model = model_named(model) if isinstance(model, str) else model
    cluster = cluster_named(cluster) if isinstance(cluster, str) else cluster
    engine = engine_named(engine) if isinstance(engine, str) else engine
    layout, regime = layout or Layout(ranks=cluster.gpus), regime or Regime()
    if layout.gpus > cluster.gpus:
        raise ConfigError(f"{layout.text()} need {layout.gpus} GPUs, and {cluster.name} has {cluster.gpus}")
    measured = measured_modules(model, cluster.sheet, engine, ranks=layout.ranks) if tables else None
    return _deployed(model, cluster, engine, layout, regime, measured)


def tensor_parallel(one: Deployment, ranks: int) -> Deployment:
    """Return the same model, cluster and engine with tensor parallel instances of so many ranks, KV on the devices.

    As many weights are streamed as before. Raises ConfigError for what does not fit, or an engine does not have.
    """
    if not one.engine.tensor_attention or max(one.model.layers.kv_heads, ranks) % ranks:
        raise ConfigError(f"{one.engine.title} has no {ranks} tensor parallel ranks for {one.model.title}")
    layout = Layout(instances=one.layout.gpus // ranks, ranks=ranks, tensor=True)
    regime = Regime(streamed_weights=one.regime.streamed_weights)
    return deployment(one.model, one.cluster, one.engine, layout, regime, tables=False)


def _deployed(
    model: ClusterModel,
    cluster: Cluster,
    engine: EngineSettings,
    layout: Layout,
    regime: Regime,
    measured: MeasuredModules | None,
) -> Deployment:
    if layout.tensor and regime.prefill == DATA_PARALLEL:
        raise ConfigError(
            f"{layout.text()} share each sequence, so that they cannot prefill data-parallel; prefill expert-parallel"
        )
    memory = rank_memory(model, cluster, engine, layout, regime)
    return Deployment(
        model=model,
        cluster=cluster,
        engine=engine,
        layout=layout,
        regime=regime,
        costs=ClusterCosts(model, cluster, engine, layout, regime, measured),
        device_tokens=memory.device_tokens,
        store_tokens=memory.store_tokens,
        ranks=1 if layout.tensor else layout.ranks,
        instances=layout.instances,
        memory=memory,
    )


def feasible(
    model: str | ClusterModel, cluster: str | Cluster, engine: str | EngineSettings, *, tables: bool = True
) -> list[Deployment]:
    """Return every layout and regime of an engine in which a model fits a cluster; empty where there is none."""
    model = model_named(model) if isinstance(model, str) else model
    cluster = cluster_named(cluster) if isinstance(cluster, str) else cluster
    engine = engine_named(engine) if isinstance(engine, str) else engine
    found = []
    for layout in _layouts(model, cluster, engine):
        measured = measured_modules(model, cluster.sheet, engine, ranks=layout.ranks) if tables else None
        for regime in _regimes(model, cluster, engine, layout):
            try:
                found.append(_deployed(model, cluster, engine, layout, regime, measured))
            except ConfigError:
                continue
    return found


def _layouts(model: ClusterModel, cluster: Cluster, engine: EngineSettings) -> Iterator[Layout]:
    """Yield the layouts that an engine has, of ranks in one node or in whole nodes."""
    wide = [ranks for ranks in (16, 32) if cluster.gpus % ranks == 0 and engine.tensor_attention]
    across = [Layout(instances=cluster.gpus // ranks, ranks=ranks, tensor=True) for ranks in wide]
    for layout in [*layouts(cluster.gpus, model.layers), *across]:
        aligned = cluster.node_gpus % layout.ranks == 0 or layout.ranks % cluster.node_gpus == 0
        is_built = engine.tensor_attention if layout.tensor else layout.ranks == 1 or engine.data_attention
        if aligned and is_built:
            yield layout


def _regimes(model: ClusterModel, cluster: Cluster, engine: EngineSettings, layout: Layout) -> Iterator[Regime]:
    least = least_streamed(model, cluster, engine, layout)
    if least is None or (least > 0 and not engine.streams_weights):
        return
    shares = [least, *(share for share in _SHARES if share > least)] if engine.streams_weights else [0.0]
    for share in shares:
        for prefill in engine.prefill:
            if prefill == DATA_PARALLEL and (layout.tensor or layout.ranks == 1):
                continue
            for kv in engine.kv:
                yield from _of_kv(engine, Regime(kv=kv, streamed_weights=share, prefill=prefill), layout.ranks)


def _of_kv(engine: EngineSettings, regime: Regime, ranks: int) -> Iterator[Regime]:
    """Yield a regime with each place of attention that its form of KV allows: the host's where one GPU is alone."""
    for attention in engine.attention:
        if attention == DEVICE:
            yield regime
        elif ranks == 1 and regime.kv not in (DEVICE, STREAMED):
            yield replace(regime, attention=attention)
