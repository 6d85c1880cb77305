"""Owns what the processes of one engine run: which of our classes, started with what, and how a child begins."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import signal
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from sgl_batch.config import BatchConfig
from sgl_batch.core.plan_in_force import PlanInForce
from sgl_batch.core.topology import Topology
from sgl_batch.distributed.rank_cores import read_cpus, share_of
from sgl_batch.distributed.rank_errors import RankError
from sgl_batch.distributed.rank_place import RankPlace
from sgl_batch.distributed.rendezvous import Rendezvous
from sgl_batch.errors import ConfigError, SglBatchError
from sgl_batch.layers.counter_sampler import CounterSampler
from sgl_batch.managers.rank_controller import run_rank_controller
from sgl_batch.managers.scheduler import BatchScheduler
from sgl_batch.model_executor.counters import Counters, PartClock
from sgl_batch.model_executor.cpu_operators import CpuOperators
from sgl_batch.model_executor.cuda_graphs import CudaGraphs, Graphs
from sgl_batch.model_executor.gpu_experts import GpuExperts
from sgl_batch.model_executor.run_context import RunContext
from sgl_batch.model_executor.sampled_parts import SampledParts
from sgl_batch.owned_directory import OwnedDirectory, belongs_to, remove_abandoned
from sgl_batch.sglang_adapter import processes
from sgl_batch.sglang_adapter.child_processes import FORKSERVER, SPAWN, start_method_of
from sgl_batch.sglang_adapter.fork_server import Surroundings
from sgl_batch.sglang_adapter.names import CPU_PLATFORM
from sgl_batch.sglang_adapter.private_ports import LONGEST_NAME
from sgl_batch.sglang_adapter.received_pickles import read_pickles_strictly
from sgl_batch.sglang_adapter.triton_attention import register_triton_attention

logger = logging.getLogger(__name__)

# What the kernel takes.
_LONGEST_SOCKET = 107


def device_graphs() -> Graphs | None:
    """What captures graphs in a scheduler process: its GPU."""
    return None if _is_on_cpu() else CudaGraphs()


def _is_on_cpu() -> bool:
    return os.environ.get("SGLANG_PLATFORM") == CPU_PLATFORM


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRun:
    """What the processes of one engine are started with. `directory`: where its processes find each other.

    It is SGLang's scheduler process function, and has its controller's and the detokenizer's beside it.
    `start_method`: multiprocessing's, for those that SGLang starts from this process. `graphs`: what gives a scheduler
    process its way to capture graphs, or None. `owned`: the directory, where it was made for this run.
    """

    config: BatchConfig
    directory: Path
    start_method: str
    graphs: Callable[[], Graphs | None] = device_graphs
    owned: OwnedDirectory | None = None
    surroundings: Surroundings = field(default_factory=Surroundings)

    @classmethod
    def begin(cls, config: BatchConfig, start_method: str, directory: Path | None = None) -> EngineRun:
        """A run in `directory`, which is closed to other users, or in a new one.

        Directories of runs that were killed are removed. Raises ConfigError where the directory's name leaves no room
        for those of sockets.
        """
        remove_abandoned(_PREFIX)
        if directory is None:
            owned = OwnedDirectory.make(_PREFIX)
            run = cls(config=config, directory=owned.path, owned=owned, start_method=start_method)
        else:
            run = cls(config=config, directory=directory, start_method=start_method)
        longest = _LONGEST_SOCKET - LONGEST_NAME - 1
        if len(str(run.directory)) > longest:
            run.end()
            raise ConfigError(
                f"the directory of temporary files {run.directory} has a name of {len(str(run.directory))} characters, "
                f"too long for the names of sockets in it: set TMPDIR to one that makes it at most {longest}"
            )
        return run

    def end(self) -> None:
        """The processes have ended. A directory that was given is left to its owner, who is told of the end there."""
        if self.owned is not None:
            self.owned.remove()

    @property
    def failure(self) -> str | None:
        """Why its ranks could not go on, if they have said so."""
        return Rendezvous(self.directory).failure

    @property
    def failure_code(self) -> str | None:
        """A word for why, as EngineError has it."""
        return Rendezvous(self.directory).failure_code

    def infos(self, scheduler_infos: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """What each scheduler says of itself: several have left it in the directory, one tells SGLang."""
        told = Rendezvous(self.directory).published("info")
        return [json.loads(told[rank]) for rank in sorted(told)] or [info["sgl_batch"] for info in scheduler_infos]

    def __call__(self, *args: object, **kwargs: object) -> None:
        run_scheduler_process(self, *args, **kwargs)

    def controller(self, **kwargs: object) -> None:
        """Body of the process that starts the ranks."""
        _begin_as_child(self)
        with start_method_of(self) if self.start_method == FORKSERVER else nullcontext():
            run_rank_controller(self.directory, **kwargs)

    def detokenizer(self, *args: object, **kwargs: object) -> None:
        """Body of the detokenizer process: SGLang's own, imported through our adapter so that it starts on a CPU."""
        _begin_as_child(self)
        processes.run_detokenizer_process(*args, **kwargs)


def run_scheduler_process(run: EngineRun, *args: object, **kwargs: object) -> None:
    """Body of a scheduler process: ours, in SGLang's process function."""
    _begin_as_child(run)
    belongs_to(run.directory, processes.load_file(args[_PORT_ARGS]))
    config, place = run.config, _place(run.directory, args)
    operators, gpu_experts = None, None
    counters = Counters() if _is_on_cpu() else Counters(clock=PartClock(SampledParts()))
    if _is_on_cpu():
        operators = CpuOperators(counters, config.forward.expert_runner, config.forward.cpu_weight_dtype)
        operators.register()
    else:
        # Whatever asks for the current GPU from here on finds this process's, and opens no context on another.
        gpu_id = args[_GPU_ID]
        assert isinstance(gpu_id, int), f"{gpu_id!r} is no number of a GPU"
        torch.cuda.set_device(gpu_id)
        gpu_experts = GpuExperts(config.forward.expert_runner, torch.cuda.get_device_name(), counters)
    context = RunContext(
        in_force=PlanInForce(config),
        counters=counters,
        cpu_operators=operators,
        gpu_experts=gpu_experts,
        graphs=run.graphs(),
        place=place,
        rendezvous=Rendezvous(run.directory),
    )
    register_triton_attention()
    processes.run_scheduler_with(partial(_scheduler, context), CounterSampler, *args, **kwargs)


def _scheduler(context: RunContext, *args: object, **kwargs: object) -> BatchScheduler:
    try:
        with context.telling():
            return BatchScheduler(*args, context=context, **kwargs)
    except RankError:
        raise
    except SglBatchError:
        # It is told, and the engine's process says it. SGLang would print a traceback that helps with no such mistake.
        logger.debug("this scheduler does not start", exc_info=True)
        os._exit(1)
    except Exception as error:
        context.rendezvous.report_failure(f"{type(error).__name__}: {processes.words_of(error)}")
        raise


# SGLang's positional arguments of a scheduler process.
_SERVER_ARGS, _PORT_ARGS, _GPU_ID, _DP_RANK = 0, 1, 2, 8
# The kernel takes 107 characters for the name of a socket.
_PREFIX = "sgl-batch-"


def _place(directory: Path, args: tuple[Any, ...]) -> RankPlace | None:
    """This process's rank, where there are several; on a CPU it takes its share of the cores."""
    server_args = args[_SERVER_ARGS]
    if server_args.dp_size == 1:
        return None
    topology = Topology.uniform(server_args.dp_size)
    rank = topology.rank_of_attention(args[_DP_RANK])  # SGLang starts one process for each data-parallel target
    shares_gpu = server_args.device != "cpu" and server_args.dp_size > torch.cuda.device_count()
    place = RankPlace(rank=rank, topology=topology, directory=directory, shares_gpu=shares_gpu)
    place.rendezvous.publish("pid", rank, str(os.getpid()))
    if server_args.device == "cpu":
        cores = share_of(read_cpus(os.sched_getaffinity(0)), rank, topology.num_ranks)
        os.sched_setaffinity(0, cores)
        torch.set_num_threads(len(cores))
    return place


def _begin_as_child(run: EngineRun) -> None:
    """What a forked child has of its parent and a new process has not: handlers of signals, and how children start.

    Ctrl-C on a terminal reaches every process of the group; the parent alone decides what it means. A parent that was
    killed while this process began has no other way to end it.
    """
    processes.end_with_parent()
    run.surroundings.take()
    read_pickles_strictly()
    for number in (signal.SIGTERM, signal.SIGQUIT, signal.SIGHUP):
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    multiprocessing.set_start_method(SPAWN, force=True)
