"""Decides how many rows an engine has in flight, and how many CPUs and GPUs it takes. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sgl_batch.errors import ConfigError

# So many times the engine's group are in flight: one that decodes, and one that is read, prefilled or written.
_GROUPS_IN_FLIGHT = 2
_BATCHES = 8
# Reading, writing and the user's own functions run in tasks of one CPU each.
_TASK_CPUS = 1
_LEAST_ENGINE_CPUS = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Flow:
    """Batches of `batch_size` rows, of which at most `batches` are in one engine at once."""

    batch_size: int
    batches: int

    @property
    def rows(self) -> int:
        """The rows in flight in one engine, where the dataset has that many."""
        return self.batch_size * self.batches


def flow_for(group: int, batch_size: int | None = None, batches: int | None = None) -> Flow:
    """Return a flow that keeps an engine's group full.

    Args:
        group: The sequences that the engine decodes together, `b_moe_decode` of its plan.
        batch_size: Rows of a batch, where the user gave it.
        batches: Batches at once, where the user gave it.

    Raises:
        ConfigError: The user gave both, and the group cannot be full.
    """
    wanted = _GROUPS_IN_FLIGHT * group
    if batch_size is None:
        return Flow(batch_size=math.ceil(wanted / (batches or _BATCHES)), batches=batches or _BATCHES)
    if batches is None:
        return Flow(batch_size=batch_size, batches=max(_BATCHES, math.ceil(wanted / batch_size)))
    flow = Flow(batch_size=batch_size, batches=batches)
    if flow.rows < group:
        raise ConfigError(
            f"batch_size {batch_size} times max_concurrent_batches {batches} is {flow.rows} rows at once, and the "
            f"engine decodes {group} sequences together (b_moe_decode): leave one of the two out, or give at least "
            f"batch_size {math.ceil(group / batches)}"
        )
    return flow


def gpus_of(engine_kwargs: Mapping[str, object], *, on_gpu: bool) -> int:
    """Return how many GPUs an engine takes.

    Ranks with data-parallel attention are among the tensor-parallel ones: `dp_size` multiplies nothing.
    """
    if not on_gpu:
        return 0
    return _count(engine_kwargs, "tp_size") * _count(engine_kwargs, "pp_size")


def _count(engine_kwargs: Mapping[str, object], name: str) -> int:
    value = engine_kwargs.get(name)
    return value if isinstance(value, int) and value > 0 else 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """What a run takes of a cluster: `engines` actors of `cpus` and `gpus` each, and CPUs for other work.

    `resumes`: a checkpoint is read, whose filter is an actor of one CPU.
    """

    engines: int
    cpus: float
    gpus: int = 0
    resumes: bool = False

    @property
    def spare_cpus(self) -> int:
        """The CPUs that must stay beside the engines."""
        return spare_cpus(resumes=self.resumes)


def spare_cpus(*, resumes: bool) -> int:
    """Return the CPUs that reading and writing take at least, and the filter of a checkpoint."""
    return _TASK_CPUS + resumes


def cpus_for(nodes: Sequence[Mapping[str, float]], engines: int, *, resumes: bool) -> int:
    """Return the most CPUs that each of `engines` can have on these nodes, with CPUs to spare for other tasks.

    Args:
        nodes: The resources of each node that is alive, by Ray's names ("CPU", "GPU").
        engines: How many engines there are.
        resumes: Whether a checkpoint may be read.

    At least one, also where that is too many: the check of the run then says so.
    """
    most = int(max((node.get("CPU", 0) for node in nodes), default=0))
    total = sum(node.get("CPU", 0) for node in nodes)
    for cpus in range(most, 0, -1):
        fit = sum(int(node.get("CPU", 0) // cpus) for node in nodes)
        if fit >= engines and total - engines * cpus >= spare_cpus(resumes=resumes):
            return cpus
    return _LEAST_ENGINE_CPUS


def check_fits(nodes: Sequence[Mapping[str, float]], need: Need) -> None:
    """Raise ConfigError where a run would wait for ever: for CPUs, or for a node that can have an engine."""
    each = f"{need.cpus:g} CPUs" + (f" and {need.gpus} GPUs" if need.gpus else "")
    fit = sum(_engines_on(node, need) for node in nodes)
    if fit < need.engines:
        have = ", ".join(f"{node.get('CPU', 0):g} CPUs and {node.get('GPU', 0):g} GPUs" for node in nodes)
        raise ConfigError(
            f"{need.engines} engine(s) of {each} do not fit the cluster, which has room for {fit} (nodes: {have}): "
            "lower concurrency or num_cpus, or add nodes"
        )
    total = sum(node.get("CPU", 0) for node in nodes)
    left = total - need.engines * need.cpus
    if left < need.spare_cpus:
        beside = "reads, writes and the filter of the checkpoint" if need.resumes else "reads and writes"
        raise ConfigError(
            f"{need.engines} engine(s) of {each} leave {left:g} of the cluster's {total:g} CPUs, and {beside} take "
            f"{need.spare_cpus}: the run would wait for ever; lower num_cpus or concurrency, or give Ray more CPUs"
        )


def _engines_on(node: Mapping[str, float], need: Need) -> int:
    by_cpu = int(node.get("CPU", 0) // need.cpus) if need.cpus else need.engines
    return min(by_cpu, int(node.get("GPU", 0) // need.gpus)) if need.gpus else by_cpu
