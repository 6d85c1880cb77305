"""Owns what the processes of one engine run: which of our classes, with which objects, and how a child begins."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, cast

import torch

from sgl_batch.checkpoint.read_ahead import ReadAhead
from sgl_batch.config import BatchConfig
from sgl_batch.core.plan_in_force import PlanInForce
from sgl_batch.core.topology import Topology
from sgl_batch.distributed.rank_context import RankContext
from sgl_batch.distributed.rank_cores import read_cpus, share_of
from sgl_batch.distributed.rendezvous import Rendezvous
from sgl_batch.engine.head_start import PRELOADED
from sgl_batch.errors import BAD_USAGE, ConfigError, EngineError, SglBatchError
from sgl_batch.layers.counter_sampler import CounterSampler
from sgl_batch.managers.failure_reporter import FailureReporter, fault_text, keep_traceback, traceback_text
from sgl_batch.managers.process_watch import ProcessEndedError, ProcessWatch
from sgl_batch.managers.rank_controller import run_rank_controller
from sgl_batch.managers.scheduler import BatchScheduler
from sgl_batch.metrics.counters import Counters, PartClock
from sgl_batch.metrics.sampled_parts import SampledParts
from sgl_batch.metrics.start_log import StartLog, phases, table
from sgl_batch.model_executor.cpu_operators import CpuOperators
from sgl_batch.model_executor.cuda_graphs import CudaGraphs, Graphs
from sgl_batch.model_executor.gpu_experts import GpuExperts
from sgl_batch.model_executor.run_context import RunContext
from sgl_batch.model_executor.time_budget import TimeBudget
from sgl_batch.owned_directory import OwnedDirectory, register_shared_memory, remove_abandoned
from sgl_batch.sglang_adapter import processes
from sgl_batch.sglang_adapter.child_processes import FORK, FORKSERVER, SPAWN, start_method_of
from sgl_batch.sglang_adapter.fork_server import CallerEnvironment
from sgl_batch.sglang_adapter.model_classes import import_model_classes
from sgl_batch.sglang_adapter.names import CPU_PLATFORM
from sgl_batch.sglang_adapter.private_ports import LONGEST_NAME
from sgl_batch.sglang_adapter.received_pickles import read_pickles_strictly
from sgl_batch.sglang_adapter.triton_attention import register_triton_attention
from sgl_batch.sglang_adapter.types.messages import ServerArgs
from sgl_batch.startup.expert_setup import ExpertSetup
from sgl_batch.startup.weights_ahead import resident_files, weights_ahead

_NO_START = "the engine did not start: "
_LONGEST_SOCKET = 107  # characters of a socket's name that the kernel takes


def device_graphs() -> Graphs | None:
    """Return what captures graphs in a scheduler process, or None on a CPU."""
    return None if _is_on_cpu() else CudaGraphs()


def _is_on_cpu() -> bool:
    return os.environ.get("SGLANG_PLATFORM") == CPU_PLATFORM


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSpec:
    """What the processes of one engine are started with.

    It is itself SGLang's scheduler process function; `controller` and `detokenizer` are the functions of the other two.
    `directory`: where the processes find each other. `start_method`: multiprocessing's, for processes that SGLang
    starts from this one. `graphs` returns what captures graphs in a scheduler process, or None. `owned`: the directory,
    if it was made for this engine. `tracebacks`: the directory for tracebacks of faults (None: that of temporary
    files). `processes`: the processes that this one has started. `preloaded`: what a fork server imports.
    """

    preloaded: ClassVar = PRELOADED

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
        """Begin an engine in `directory`, which is closed to other users, or in a new directory.

        Directories of engines that were killed are removed. Raises ConfigError where the directory's name is too long
        for sockets in it.
        """
        remove_abandoned(_PREFIX)
        if directory is None:
            owned = OwnedDirectory.make(_PREFIX)
            spec = cls(config=config, directory=owned.path, owned=owned, start_method=start_method)
        else:
            spec = cls(config=config, directory=directory, start_method=start_method, tracebacks=tracebacks)
        longest = _LONGEST_SOCKET - LONGEST_NAME - 1
        if len(str(spec.directory)) > longest:
            spec.end()
            raise ConfigError(
                f"the directory of temporary files {spec.directory} has a name of {len(str(spec.directory))} "
                f"characters, too long for the names of sockets in it: set TMPDIR so that it has at most {longest}"
            )
        return spec

    def end(self) -> None:
        """Remove the directory when the processes have ended. A directory that was given stays with its owner."""
        if self.owned is not None:
            self.owned.remove()

    def watch(self, on_death: Callable[[EngineError], None]) -> None:
        """Call `on_death` in a thread, with the reason, as soon as one of the engine's processes ends."""
        self.processes.watch(lambda how: on_death(self._error("", how)))

    def start_error(self, error: BaseException) -> BaseException:
        """Return the exception for the user where `error` has ended the start: `error` itself if that is complete."""
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
        """Return the error of an engine whose process ended: its own report, or else `how` it was seen to end."""
        failure = Rendezvous(self.directory).failure
        if failure is None:
            return EngineError(f"{prefix}{how}")
        kept = keep_traceback(failure.traceback, self.tracebacks) if failure.traceback else ""
        return EngineError(f"{prefix}{failure.text}{kept}", code=failure.code)

    def infos(self, scheduler_infos: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the info of each scheduler. Several ranks publish it; a single one sends it to SGLang."""
        published = Rendezvous(self.directory).published("info")
        return [json.loads(published[rank]) for rank in sorted(published)] or [
            info["sgl_batch"] for info in scheduler_infos
        ]

    def __call__(self, *args: object, **kwargs: object) -> None:
        run_scheduler_process(self, *args, **kwargs)

    def controller(self, **kwargs: object) -> None:
        """Run the process that starts the ranks.

        It has threads, so it does not fork the ranks. Where it was forked itself, it starts a fork server, which
        imports once for all ranks and shares that memory with them.
        """
        reporter = self.failure_reporter("the controller of the ranks")
        ranks = replace(self, start_method=FORKSERVER) if self.start_method == FORK else self
        with reporter.end_on_error():
            _begin_as_child(self)
            with start_method_of(ranks), self.weights_ahead(cast(ServerArgs, kwargs["server_args"])):
                run_rank_controller(reporter, **kwargs)

    def detokenizer(self, *args: object, **kwargs: object) -> None:
        """Run the detokenizer process: SGLang's own, imported through our adapter so that it starts on a CPU."""
        reporter = self.failure_reporter("the detokenizer")
        with reporter.end_on_error():
            _begin_as_child(self)
            self.start_log("detokenizer").end("process begun, programs imported")
            processes.run_detokenizer_with(reporter.end, *args, **kwargs)

    def weights_ahead(self, server_args: ServerArgs) -> ReadAhead:
        """Return what reads the model's weights ahead. A process in which it is entered must not be forked."""
        files = resident_files(
            server_args.model_path,
            revision=server_args.revision,
            load_format=server_args.load_format,
            weights=self.config.memory.weights,
        )
        return weights_ahead(files, num_ranks=server_args.dp_size)

    def start_log(self, process: str, *, from_process: bool = True) -> StartLog:
        """Return a process's log of the start; one that logs nothing where none was asked for."""
        asked = self.config.trace.log_startup
        return StartLog(self.directory if asked else None, process, from_process=from_process)

    def start_text(self) -> str:
        """Return what the processes have logged of the start so far; empty where no log was asked for."""
        return f"the start, by process:\n{table(phases(self.directory))}" if self.config.trace.log_startup else ""

    def failure_reporter(self, name: str, *, is_rank: bool = False) -> FailureReporter:
        """Return what reports the end of a process of this engine."""
        return FailureReporter(rendezvous=Rendezvous(self.directory), name=name, is_rank=is_rank)


def run_scheduler_process(spec: ProcessSpec, *args: object, **kwargs: object) -> None:
    """Run a scheduler process: our scheduler in SGLang's process function."""
    is_rank = args[_DP_RANK] is not None
    name = f"rank {args[_DP_RANK]} of the engine" if is_rank else "the scheduler"
    reporter = spec.failure_reporter(name, is_rank=is_rank)
    with reporter.end_on_error():
        _begin_as_child(spec)
        # For several ranks, the controller reads.
        with nullcontext() if is_rank else spec.weights_ahead(cast(ServerArgs, args[_SERVER_ARGS])):
            _run_scheduler(spec, reporter, *args, **kwargs)


def _run_scheduler(spec: ProcessSpec, reporter: FailureReporter, *args: object, **kwargs: object) -> None:
    register_shared_memory(spec.directory, processes.load_file(args[_PORT_ARGS]))
    config, rank_context = spec.config, _rank_context(spec.directory, args)
    in_force, budget = PlanInForce(config), TimeBudget()
    operators, gpu_experts = None, None
    counters = Counters() if _is_on_cpu() else Counters(clock=PartClock(SampledParts()))
    start_log = spec.start_log("scheduler" if args[_DP_RANK] is None else f"rank {args[_DP_RANK]}")
    if _is_on_cpu():
        import_model_classes()
        splits_experts = config.ranks.partition_experts == "split"
        operators = CpuOperators(counters, config.forward, splits_experts=splits_experts)
        operators.register()
    else:
        # From here on the current GPU is this process's, so that no context opens on another GPU.
        gpu_id = args[_GPU_ID]
        assert isinstance(gpu_id, int), f"{gpu_id!r} is not the number of a GPU"
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
        start_log=start_log,
        counters=counters,
        cpu_operators=operators,
        gpu_experts=gpu_experts,
        graphs=spec.graphs(),
        rank_context=rank_context,
        rendezvous=Rendezvous(spec.directory),
    )
    register_triton_attention()
    start_log.end("process begun, programs imported")
    scheduler = partial(BatchScheduler, context=context)
    processes.run_scheduler_with(scheduler, CounterSampler, reporter.end, *args, **kwargs)


# SGLang's positional arguments of a scheduler process.
_SERVER_ARGS, _PORT_ARGS, _GPU_ID, _DP_RANK = 0, 1, 2, 8
_PREFIX = "sgl-batch-"


def _rank_context(directory: Path, args: tuple[Any, ...]) -> RankContext | None:
    """Return the context of this process's rank, None for a single rank. On a CPU, take the rank's share of cores."""
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


def _begin_as_child(spec: ProcessSpec) -> None:
    """Reset what a forked child inherits and a new process has not: handlers of signals, and how children start.

    Ctrl-C on a terminal reaches every process of the group, and only the parent reacts to it. The child ends with its
    parent from now on, also where the parent was killed during the child's start.
    """
    processes.end_with_parent()
    spec.caller_environment.take()
    read_pickles_strictly()
    for number in (signal.SIGTERM, signal.SIGQUIT, signal.SIGHUP):
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    multiprocessing.set_start_method(SPAWN, force=True)
