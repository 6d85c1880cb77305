"""Owns what the processes of one engine run: which of our classes, started with what, and how a child begins."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch

from sgl_batch.config import BatchConfig
from sgl_batch.core.plan_in_force import PlanInForce
from sgl_batch.core.topology import Topology
from sgl_batch.distributed.rank_context import RankContext
from sgl_batch.distributed.rank_cores import read_cpus, share_of
from sgl_batch.distributed.rendezvous import Rendezvous
from sgl_batch.errors import BAD_USAGE, ConfigError, EngineError, SglBatchError
from sgl_batch.layers.counter_sampler import CounterSampler
from sgl_batch.managers.failure_reporter import FailureReporter, fault_text, keep_traceback, traceback_text
from sgl_batch.managers.process_watch import ProcessEndedError, ProcessWatch
from sgl_batch.managers.rank_controller import run_rank_controller
from sgl_batch.managers.scheduler import BatchScheduler
from sgl_batch.metrics.counters import Counters, PartClock
from sgl_batch.metrics.sampled_parts import SampledParts
from sgl_batch.model_executor.cpu_operators import CpuOperators
from sgl_batch.model_executor.cuda_graphs import CudaGraphs, Graphs
from sgl_batch.model_executor.gpu_experts import GpuExperts
from sgl_batch.model_executor.run_context import RunContext
from sgl_batch.model_executor.time_budget import TimeBudget
from sgl_batch.owned_directory import OwnedDirectory, register_shared_memory, remove_abandoned
from sgl_batch.sglang_adapter import processes
from sgl_batch.sglang_adapter.child_processes import FORKSERVER, SPAWN, start_method_of
from sgl_batch.sglang_adapter.fork_server import CallerEnvironment
from sgl_batch.sglang_adapter.names import CPU_PLATFORM
from sgl_batch.sglang_adapter.private_ports import LONGEST_NAME
from sgl_batch.sglang_adapter.received_pickles import read_pickles_strictly
from sgl_batch.sglang_adapter.triton_attention import register_triton_attention
from sgl_batch.sglang_adapter.types.messages import ServerArgs
from sgl_batch.startup.expert_setup import ExpertSetup

_NO_START = "the engine did not start: "
# What the kernel takes.
_LONGEST_SOCKET = 107


def device_graphs() -> Graphs | None:
    """What captures graphs in a scheduler process: its GPU."""
    return None if _is_on_cpu() else CudaGraphs()


def _is_on_cpu() -> bool:
    return os.environ.get("SGLANG_PLATFORM") == CPU_PLATFORM


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSpec:
    """What the processes of one engine are started with. `directory`: where its processes find each other.

    It is SGLang's scheduler process function, and has its controller's and the detokenizer's beside it.
    `start_method`: multiprocessing's, for those that SGLang starts from this process. `graphs`: what gives a scheduler
    process its way to capture graphs, or None. `owned`: the directory, where it was made for this run. `tracebacks`:
    where those of faults are kept, None for the directory of temporary files. `processes`: those that this process has
    started.
    """

    config: BatchConfig
    directory: Path
    start_method: str
    graphs: Callable[[], Graphs | None] = device_graphs
    owned: OwnedDirectory | None = None
    tracebacks: Path | None = None
    processes: ProcessWatch = field(default_factory=ProcessWatch)
    caller_environment: CallerEnvironment = field(default_factory=CallerEnvironment)

    @classmethod
    def begin(
        cls, config: BatchConfig, start_method: str, directory: Path | None = None, tracebacks: Path | None = None
    ) -> ProcessSpec:
        """A run in `directory`, which is closed to other users, or in a new one.

        Directories of runs that were killed are removed. Raises ConfigError where the directory's name leaves no room
        for those of sockets.
        """
        remove_abandoned(_PREFIX)
        if directory is None:
            owned = OwnedDirectory.make(_PREFIX)
            run = cls(config=config, directory=owned.path, owned=owned, start_method=start_method)
        else:
            run = cls(config=config, directory=directory, start_method=start_method, tracebacks=tracebacks)
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

    def watch(self, on_death: Callable[[EngineError], None]) -> None:
        """Call `on_death`, in a thread, with why the engine cannot go on, as soon as one of its processes ends."""
        self.processes.watch(lambda how: on_death(self._error("", how)))

    def start_error(self, error: BaseException) -> BaseException:
        """What the user gets for `error`, which has ended the start: `error` itself where that says it all."""
        failure = Rendezvous(self.directory).failure
        if failure is not None and failure.code == BAD_USAGE:
            return ConfigError(failure.text)
        if failure is not None or isinstance(error, ProcessEndedError):
            return self._error(_NO_START, str(error))
        if isinstance(error, SglBatchError) or not isinstance(error, Exception):
            return error
        kept = keep_traceback(traceback_text(error), self.tracebacks)
        return EngineError(f"{_NO_START}{fault_text(error)}{kept}")

    def _error(self, prefix: str, how: str) -> EngineError:
        """The error of an engine of which a process has ended: in its own words, or else `how` it was seen to end."""
        failure = Rendezvous(self.directory).failure
        if failure is None:
            return EngineError(f"{prefix}{how}")
        kept = keep_traceback(failure.traceback, self.tracebacks) if failure.traceback else ""
        return EngineError(f"{prefix}{failure.text}{kept}", code=failure.code)

    def infos(self, scheduler_infos: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """What each scheduler says of itself: several have left it in the directory, one tells SGLang."""
        told = Rendezvous(self.directory).published("info")
        return [json.loads(told[rank]) for rank in sorted(told)] or [info["sgl_batch"] for info in scheduler_infos]

    def __call__(self, *args: object, **kwargs: object) -> None:
        run_scheduler_process(self, *args, **kwargs)

    def controller(self, **kwargs: object) -> None:
        """Body of the process that starts the ranks."""
        reporter = self.failure_reporter("the controller of the ranks")
        with reporter.end_on_error():
            _begin_as_child(self)
            with start_method_of(self) if self.start_method == FORKSERVER else nullcontext():
                run_rank_controller(reporter, **kwargs)

    def detokenizer(self, *args: object, **kwargs: object) -> None:
        """Body of the detokenizer process: SGLang's own, imported through our adapter so that it starts on a CPU."""
        reporter = self.failure_reporter("the detokenizer")
        with reporter.end_on_error():
            _begin_as_child(self)
            processes.run_detokenizer_with(reporter.end, *args, **kwargs)

    def failure_reporter(self, name: str, *, is_rank: bool = False) -> FailureReporter:
        """Return what reports the end of the process called `name`."""
        return FailureReporter(rendezvous=Rendezvous(self.directory), name=name, is_rank=is_rank)


def run_scheduler_process(run: ProcessSpec, *args: object, **kwargs: object) -> None:
    """Body of a scheduler process: ours, in SGLang's process function."""
    is_rank = args[_DP_RANK] is not None
    name = f"rank {args[_DP_RANK]} of the engine" if is_rank else "the scheduler"
    reporter = run.failure_reporter(name, is_rank=is_rank)
    with reporter.end_on_error():
        _begin_as_child(run)
        _run_scheduler(run, reporter, *args, **kwargs)


def _run_scheduler(run: ProcessSpec, reporter: FailureReporter, *args: object, **kwargs: object) -> None:
    register_shared_memory(run.directory, processes.load_file(args[_PORT_ARGS]))
    config, rank_context = run.config, _rank_context(run.directory, args)
    in_force, budget = PlanInForce(config), TimeBudget()
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
        setup = ExpertSetup(
            device=torch.cuda.get_device_name(),
            in_force=in_force,
            server_args=cast(ServerArgs, args[_SERVER_ARGS]),
            budget=budget,
            num_ranks=1 if rank_context is None else rank_context.topology.num_ranks,
        )
        gpu_experts = GpuExperts(config.forward.expert_runner, counters, setup)
    context = RunContext(
        in_force=in_force,
        budget=budget,
        counters=counters,
        cpu_operators=operators,
        gpu_experts=gpu_experts,
        graphs=run.graphs(),
        rank_context=rank_context,
        rendezvous=Rendezvous(run.directory),
    )
    register_triton_attention()
    scheduler = partial(BatchScheduler, context=context)
    processes.run_scheduler_with(scheduler, CounterSampler, reporter.end, *args, **kwargs)


# SGLang's positional arguments of a scheduler process.
_SERVER_ARGS, _PORT_ARGS, _GPU_ID, _DP_RANK = 0, 1, 2, 8
# The kernel takes 107 characters for the name of a socket.
_PREFIX = "sgl-batch-"


def _rank_context(directory: Path, args: tuple[Any, ...]) -> RankContext | None:
    """This process's rank, where there are several; on a CPU it takes its share of the cores."""
    server_args = args[_SERVER_ARGS]
    if server_args.dp_size == 1:
        return None
    topology = Topology.uniform(server_args.dp_size)
    rank = topology.rank_of_attention(args[_DP_RANK])  # SGLang starts one process for each data-parallel target
    shares_gpu = server_args.device != "cpu" and server_args.dp_size > torch.cuda.device_count()
    rank_context = RankContext(rank=rank, topology=topology, directory=directory, shares_gpu=shares_gpu)
    rank_context.rendezvous.publish("pid", rank, str(os.getpid()))
    if server_args.device == "cpu":
        cores = share_of(read_cpus(os.sched_getaffinity(0)), rank, topology.num_ranks)
        os.sched_setaffinity(0, cores)
        torch.set_num_threads(len(cores))
    return rank_context


def _begin_as_child(run: ProcessSpec) -> None:
    """What a forked child has of its parent and a new process has not: handlers of signals, and how children start.

    Ctrl-C on a terminal reaches every process of the group; the parent alone decides what it means. A parent that was
    killed while this process began has no other way to end it.
    """
    processes.end_with_parent()
    run.caller_environment.take()
    read_pickles_strictly()
    for number in (signal.SIGTERM, signal.SIGQUIT, signal.SIGHUP):
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    multiprocessing.set_start_method(SPAWN, force=True)
