"""Owns the engine's Python API: sglang.Engine's API over our processes, and answers to single request lines.

It knows requests and sequences, but no jobs.
"""

from __future__ import annotations

import atexit
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

from sgl_batch.checkpoint.model_directory import ModelSource
from sgl_batch.config import BatchConfig, from_mapping, split_kwargs
from sgl_batch.core.plan_change import PlanChange
from sgl_batch.engine import launch
from sgl_batch.engine.line_answers import LineAnswers
from sgl_batch.engine.own_loop import OwnLoop
from sgl_batch.engine.process_spec import ProcessSpec
from sgl_batch.engine.rank_stats import merged_stats
from sgl_batch.errors import ConfigError, EngineError
from sgl_batch.planner.refinement import PlanBasis
from sgl_batch.planner.schedule import Prediction
from sgl_batch.planner.workload import Workload
from sgl_batch.sglang_adapter import processes
from sgl_batch.sglang_adapter.child_processes import FORK, FORKSERVER, SPAWN
from sgl_batch.sglang_adapter.faults import error_text
from sgl_batch.sglang_adapter.names import CPU_PLATFORM
from sgl_batch.sglang_adapter.tokenizing import SetInternalStateReq
from sgl_batch.startup.argument_checks import check_names
from sgl_batch.startup.family_arguments import has_sinks
from sgl_batch.startup.model_checks import check_any_device
from sgl_batch.startup.plan_inputs import plan_start, predicted
from sgl_batch.startup.start_plan import StartPlan, conservative


class Engine(processes.RankedEngine):
    """A drop-in replacement for sglang.Engine.

    It takes sglang.Engine's arguments and the fields of `sgl_batch.config.BatchConfig`, and starts its processes before
    it returns. When one of them ends later, every awaited answer and every later call raises EngineError; the caller
    then calls `shutdown`, and may start another engine in the same process.

    Args:
        **kwargs: SGLang's arguments (`model_path`, `dp_size`, ...) and ours (`b_moe_decode`, `kv_store_bytes`, ...), by
            their names in Python. Sizes of groups that are not given are planned, where a profile of the model on this
            machine is kept (docs/plan.md). A program that has parsed and checked the arguments passes `server_args` (a
            ServerArgs), `start_plan` (a StartPlan) and `start_method` (multiprocessing's) instead.

    Raises:
        ConfigError: The arguments, the model and this machine cannot work together. No process is left.
        EngineError: The engine does not start, or other classes than ours run. No process is left.
    """

    num_engines = 1
    init_tokenizer_manager_func = staticmethod(launch.start_tokenizer_manager)

    def __init__(self, **kwargs: Any) -> None:
        server_args, start_method = kwargs.pop("server_args", None), kwargs.pop("start_method", None)
        plan: StartPlan | None = kwargs.pop("start_plan", None)
        if server_args is None:
            config, rest = split_kwargs(kwargs)
            check_names(rest, processes.argument_names())
            check_any_device(model_source(rest))
            rest.setdefault("log_level", "error")
            plan = plan_start(config, kwargs.keys() - rest.keys(), rest, on_cpu=launch.on_cpu(rest))
            server_args = make_server_args(rest, plan.config)
        self.start_plan = plan or conservative(BatchConfig(), "a program gave its arguments")
        self.batch_config: BatchConfig = self.start_plan.config
        platform = launch.child_platform(server_args)
        if start_method is None:  # on a GPU's machine imports initialise the GPU; such a process cannot be forked
            start_method = FORKSERVER if platform == CPU_PLATFORM else SPAWN
        spec = self._spec = self.run_scheduler_process_func = ProcessSpec.begin(self.batch_config, start_method)
        self.run_detokenizer_process_func = spec.detokenizer
        start_log = spec.start_log("program", from_process=False)
        self._own_loop = OwnLoop()
        ahead = nullcontext() if start_method == FORK else spec.weights_ahead(server_args)
        with processes.platform(platform), launch.start_errors(spec), ahead:
            super().__init__(server_args=server_args)
        self.own_processes = processes.processes_of(self.get_all_child_pids())
        infos = spec.infos(self._scheduler_init_result.scheduler_infos)
        try:
            self.running = launch.verify(infos, self.tokenizer_manager, server_args)
        except EngineError:
            self.shutdown()
            raise
        start_log.end("all processes started")
        launch.announce_start(spec)
        launch.announce("forward", self.running["forward"])
        launch.announce("plan", self.start_plan.source)
        spec.watch(self.tokenizer_manager.note_death)

    def shutdown(self) -> None:
        """End this engine's processes, and wait for their end. Idempotent. Answers that are awaited are lost.

        Tasks of an event loop that the engine has made are cancelled, and the loop is closed. Later calls raise
        EngineError.
        """
        loop = getattr(self, "loop", None)
        try:
            if loop is not None:
                self._own_loop.end_tasks(loop)
            if self.tokenizer_manager is not None:
                self.tokenizer_manager.note_end()
                self.tokenizer_manager.grammar_process.close()
            processes.end_processes(self)
            self._spec.processes.close()
            if loop is not None:
                self.loop = self._own_loop.close(loop)
        finally:
            self._spec.end()
        atexit.unregister(self.shutdown)

    def line_engine(self) -> LineAnswers:
        """Return this engine as jobs use it: a `jobs.line_engine.LineEngine`.

        Its methods are called on `self.loop`. It lives as long as this engine. From now on only its methods raise the
        engine's death, and not the other calls of this object.
        """
        manager = self.tokenizer_manager
        manager.death.is_raised = False
        return LineAnswers(manager, self.template_manager, lambda: manager.death.error)

    def plan_manifest(self) -> dict[str, Any]:
        """Return the plan in force, our flags, and which kernels compute what, for a run's manifest.

        Keys: plan, planned (where its sizes are from, and what they were predicted to take), flags, forward, kernels,
        expert_runner, choices. All values are JSON.
        """
        return {
            "plan": dict(self.running["plan"]),
            "planned": self.start_plan.as_dict(),
            "flags": self.batch_config.flat(),
            "forward": self.running["forward"],
            "kernels": self.running["kernels"],
            "expert_runner": self.running["expert_runner"],
            "choices": self.running["choices"],
        }

    def predict(self, workload: Workload) -> Prediction | None:
        """Return the predicted run of a batch with the sizes of this engine's start; None without a profile."""
        return predicted(self.start_plan, workload)

    def set_plan(self, **limits: int | float | str) -> None:
        """Change the plan (b_attn_decode, boundary_tokens, ...) from the next forward pass on.

        All changes take effect together, or none. Counts are in sequences for decode, in tokens for prefill.

        Args:
            **limits: New values, by the names of fields of `BatchConfig`.

        Raises:
            ConfigError: A name is unknown, or a value cannot work. The plan stays as it is.
        """
        self.loop.run_until_complete(self._change_plan(PlanChange(values=limits)))

    def plan_basis(self) -> PlanBasis | None:
        """Return what a refinement of the plan is made from; None without a profile."""
        basis = self.start_plan.basis
        most: int | None = self.tokenizer_manager.server_args.max_running_requests
        return None if basis is None else replace(basis, most_running=most)

    async def refine_plan(self, values: Mapping[str, Any], why: str) -> None:
        """Change the plan at the next boundary, on all ranks. Called on `loop`.

        Args:
            values: New values, as for `set_plan`.
            why: The reason, for the trace.

        Raises:
            ConfigError: A value cannot work. The plan stays as it is.
        """
        await self._change_plan(PlanChange(values=values, why=why))

    async def _change_plan(self, change: PlanChange) -> None:
        wanted = from_mapping({**self.batch_config.flat(), **change.values})
        request = SetInternalStateReq(server_args=change.as_message())
        if not all(await self.tokenizer_manager.set_internal_state(request)):
            states = await self.tokenizer_manager.get_internal_state()
            raise ConfigError(states[0]["sgl_batch"]["refused_change"])
        self.batch_config = wanted

    def batch_stats(self) -> dict[str, Any]:
        """Return the counters since the start: time by part (seconds), calls, rows, and tokens for each expert.

        With several ranks, counters are sums and times are means (rank_stats.py); `ranks` has each rank's own. Tokens
        for each expert are in the order of the experts. `planned` says where the sizes of the start are from.
        """
        states = self.loop.run_until_complete(self.tokenizer_manager.get_internal_state())
        return {**merged_stats([state["sgl_batch"] for state in states]), "planned": self.start_plan.source}


def model_source(kwargs: Mapping[str, Any]) -> ModelSource:
    """Return what SGLang's arguments say about the model and its tokenizer."""
    if not kwargs.get("model_path"):
        raise ConfigError("model_path is not given; name the model's directory, or its name on the hub")
    return ModelSource(
        model=str(kwargs["model_path"]),
        tokenizer=kwargs.get("tokenizer_path"),
        load_format=kwargs.get("load_format"),
        revision=kwargs.get("revision"),
        needs_tokenizer=not kwargs.get("skip_tokenizer_init"),
        is_overridden=kwargs.get("json_model_override_args") not in (None, "{}"),
    )


def make_server_args(kwargs: dict[str, Any], config: BatchConfig) -> Any:
    """Return SGLang's ServerArgs from keyword arguments, with our defaults. Raises ConfigError."""
    arguments = launch.sglang_arguments(kwargs, config)
    with processes.platform(CPU_PLATFORM if launch.on_cpu(kwargs) else None):
        try:
            return processes.server_args_of(arguments, sinks=has_sinks(arguments))
        # SGLang checks its arguments, and has no exception class for that.
        except (ArithmeticError, AssertionError, ImportError, LookupError, OSError, RuntimeError, ValueError) as error:
            raise ConfigError(f"SGLang refuses these arguments: {error_text(error)}") from error
        except (AttributeError, TypeError) as error:
            raise ConfigError(f"SGLang cannot read these arguments: {error_text(error)}") from error
