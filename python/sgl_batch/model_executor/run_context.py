"""Owns the objects that one scheduler process of ours is started with."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from sgl_batch.config import BatchConfig
from sgl_batch.core.plan_in_force import PlanInForce
from sgl_batch.distributed.rank_context import RankContext
from sgl_batch.distributed.rendezvous import Rendezvous
from sgl_batch.metrics.counters import Counters
from sgl_batch.metrics.start_log import StartLog
from sgl_batch.model_executor.cpu_operators import CpuOperators
from sgl_batch.model_executor.cuda_graphs import Graphs
from sgl_batch.model_executor.gpu_experts import GpuExperts
from sgl_batch.model_executor.time_budget import TimeBudget


@dataclass(frozen=True, slots=True, kw_only=True)
class RunContext:
    """The objects of a scheduler process that are made once, before SGLang's scheduler is built.

    One of `cpu_operators` and `gpu_experts` is None: they are for a machine without a GPU and with one. `rank_context`
    is None with one rank, `graphs` where no graph can be captured. `rendezvous` is that of all processes of the engine.
    `budget` is the time of all self-checks at the start, `start_log` its log.
    """

    in_force: PlanInForce
    rendezvous: Rendezvous
    counters: Counters = field(default_factory=Counters)
    cpu_operators: CpuOperators | None = None
    gpu_experts: GpuExperts | None = None
    graphs: Graphs | None = None
    rank_context: RankContext | None = None
    budget: TimeBudget = field(default_factory=TimeBudget)
    start_log: StartLog = field(default_factory=StartLog)

    @property
    def config(self) -> BatchConfig:
        """The configuration in force."""
        return self.in_force.config

    @property
    def rank(self) -> int:
        """This process's rank; 0 if it is the only one."""
        return 0 if self.rank_context is None else self.rank_context.rank

    @property
    def num_ranks(self) -> int:
        """How many ranks the engine has."""
        return 1 if self.rank_context is None else self.rank_context.topology.num_ranks

    @property
    def world_store(self) -> Path:
        """The file at which this process's group of torch.distributed, of one rank, meets."""
        return self.rendezvous.directory / f"world-{self.rank}"
