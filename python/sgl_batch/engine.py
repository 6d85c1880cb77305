"""Owns the engine: sglang.Engine's API over our processes, and one-line answers for batch jobs.

It knows sequences and requests, never jobs.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from sgl_batch.config import BatchConfig, split_kwargs
from sgl_batch.errors import EngineError
from sgl_batch.managers import launch
from sgl_batch.sglang_adapter import processes


class Engine(processes.Engine):  # type: ignore[misc]
    """A drop-in for sglang.Engine: the same arguments, and those of `sgl_batch.config.BatchConfig`.

    Raises ConfigError for arguments that cannot work and EngineError when our classes are not the ones running.
    """

    init_tokenizer_manager_func = staticmethod(launch.start_tokenizer_manager)
    run_detokenizer_process_func = staticmethod(launch.run_detokenizer_process)

    def __init__(self, **kwargs: Any) -> None:
        server_args = kwargs.pop("server_args", None)
        self.batch_config, rest = split_kwargs(kwargs)
        if server_args is None:
            rest.setdefault("log_level", "error")
            server_args = make_server_args(rest, self.batch_config)
        self.run_scheduler_process_func = partial(launch.run_scheduler_process, self.batch_config)
        with processes.platform(launch.child_platform(server_args)):
            super().__init__(server_args=server_args)
        try:
            self.running = launch.verify(
                self._scheduler_init_result.scheduler_infos,
                self.tokenizer_manager,
                cpu=server_args.device == "cpu",
            )
        except EngineError:
            self.shutdown()
            raise

    def plan_manifest(self) -> dict[str, Any]:
        """The plan in force, as it goes into a manifest."""
        return dict(self.running["plan"])

    def batch_stats(self) -> dict[str, Any]:
        """Counters since start: time by part, calls, rows and tokens per expert."""
        state = self.loop.run_until_complete(self.tokenizer_manager.get_internal_state())
        return dict(state[0]["sgl_batch"])


def make_server_args(kwargs: dict[str, Any], config: BatchConfig) -> Any:
    """SGLang's ServerArgs from keyword arguments, with our defaults. Raises ConfigError."""
    arguments = launch.sglang_arguments(kwargs, config)
    with processes.platform(launch.CPU_PLATFORM if launch.on_cpu(kwargs) else None):
        return processes.ServerArgs(**arguments)
