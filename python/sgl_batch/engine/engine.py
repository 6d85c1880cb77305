"""Owns the engine: sglang.Engine's API over our processes, and answers to single request lines for jobs.

It knows sequences and requests, never jobs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sgl_batch.checkpoint.model_directory import ModelSource
from sgl_batch.config import BatchConfig, from_mapping, split_kwargs
from sgl_batch.engine import launch
from sgl_batch.engine.line_answers import LineAnswers
from sgl_batch.engine.process_spec import ProcessSpec
from sgl_batch.engine.rank_stats import merged_stats
from sgl_batch.errors import ConfigError, EngineError
from sgl_batch.sglang_adapter import processes
from sgl_batch.sglang_adapter.child_processes import FORKSERVER, SPAWN
from sgl_batch.sglang_adapter.faults import error_text
from sgl_batch.sglang_adapter.names import CPU_PLATFORM
from sgl_batch.sglang_adapter.tokenizing import SetInternalStateReq
from sgl_batch.startup.family_arguments import has_sinks
from sgl_batch.startup.model_checks import check_any_device


class Engine(processes.RankedEngine):
    """A drop-in for sglang.Engine: the same arguments, and those of `sgl_batch.config.BatchConfig`.

    Raises ConfigError for arguments that cannot work, and EngineError when the engine does not start or our
    classes are not the ones running. When one of its processes ends later, whatever awaits an answer raises
    EngineError, as does every later call; then only `shutdown` is left to do.
    """

    init_tokenizer_manager_func = staticmethod(launch.start_tokenizer_manager)

    def __init__(self, **kwargs: Any) -> None:
        server_args, start_method = kwargs.pop("server_args", None), kwargs.pop("start_method", None)
        self.batch_config: BatchConfig = kwargs.pop("batch_config", None) or BatchConfig()
        if server_args is None:
            self.batch_config, rest = split_kwargs(kwargs)
            check_any_device(model_source(rest))
            rest.setdefault("log_level", "error")
            server_args = make_server_args(rest, self.batch_config)
        platform = launch.child_platform(server_args)
        if start_method is None:  # a process that has met a GPU, as imports beside one do, cannot be forked
            start_method = FORKSERVER if platform == CPU_PLATFORM else SPAWN
        run = self._run = self.run_scheduler_process_func = ProcessSpec.begin(self.batch_config, start_method)
        self.run_detokenizer_process_func = run.detokenizer
        with processes.platform(platform), launch.start_errors(run):
            super().__init__(server_args=server_args)
        self.own_processes = processes.processes_of(self.get_all_child_pids())
        infos = run.infos(self._scheduler_init_result.scheduler_infos)
        try:
            self.running = launch.verify(infos, self.tokenizer_manager, server_args)
        except EngineError:
            self.shutdown()
            raise
        launch.say_forward(self.running["forward"])
        run.watch(self.tokenizer_manager.note_death)

    def shutdown(self) -> None:
        """End this engine's processes. Idempotent."""
        try:
            if self.tokenizer_manager is not None:
                self.tokenizer_manager.grammar_process.close()
            processes.end_processes(self)
        finally:
            self._run.end()

    def line_engine(self) -> LineAnswers:
        """This engine as a job uses it: one OpenAI request at a time, on `loop`.

        From now on the engine's death is raised by what awaits these answers alone.
        """
        manager = self.tokenizer_manager
        manager.death.is_raised = False
        return LineAnswers(manager, self.template_manager, lambda: manager.death.error)

    def plan_manifest(self) -> dict[str, Any]:
        """The plan in force, our flags, and whose kernels compute what, as they go into a manifest."""
        return {
            "plan": dict(self.running["plan"]),
            "flags": self.batch_config.flat(),
            "forward": self.running["forward"],
            "kernels": self.running["kernels"],
            "expert_runner": self.running["expert_runner"],
            "choices": self.running["choices"],
        }

    def set_plan(self, **limits: int | float | str) -> None:
        """Change numbers of `BatchConfig` (b_attn_decode, boundary_tokens, ...) from the next forward pass on.

        Raises ConfigError for a name or value that cannot work; the plan stays as it is then.
        """
        wanted = from_mapping({**self.batch_config.flat(), **limits})
        request = SetInternalStateReq(server_args=limits)
        updated = self.loop.run_until_complete(self.tokenizer_manager.set_internal_state(request))
        if not all(updated):
            states = self.loop.run_until_complete(self.tokenizer_manager.get_internal_state())
            raise ConfigError(states[0]["sgl_batch"]["refused_change"])
        self.batch_config = wanted

    def batch_stats(self) -> dict[str, Any]:
        """Counters since start: time by part, calls, rows and tokens per expert. Of several ranks, the sums.

        Then `ranks` has each rank's own; tokens per expert are in the order of the experts.
        """
        states = self.loop.run_until_complete(self.tokenizer_manager.get_internal_state())
        return merged_stats([state["sgl_batch"] for state in states])


def model_source(kwargs: Mapping[str, Any]) -> ModelSource:
    """Where SGLang's arguments say that the model is."""
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
    """SGLang's ServerArgs from keyword arguments, with our defaults. Raises ConfigError."""
    arguments = launch.sglang_arguments(kwargs, config)
    with processes.platform(CPU_PLATFORM if launch.on_cpu(kwargs) else None):
        try:
            return processes.server_args_of(arguments, sinks=has_sinks(arguments))
        # It checks what it is given, and has no class of errors for that.
        except (ArithmeticError, AssertionError, ImportError, LookupError, OSError, RuntimeError, ValueError) as error:
            raise ConfigError(f"SGLang refuses these arguments: {error_text(error)}") from error
        except (AttributeError, TypeError) as error:
            raise ConfigError(f"SGLang cannot read these arguments: {error_text(error)}") from error
