"""Owns stock SGLang with the smallest platform that lets it start on a CPU, as the peer of our measurements."""

from __future__ import annotations

from typing import Any

from sgl_batch.sglang_adapter import bootstrap
from sgl_batch.sglang_adapter.child_processes import platform
from sgl_batch.sglang_adapter.names import STOCK_CPU_PLATFORM
from sgl_batch.sglang_adapter.process_trees import processes_of

# Not inside `bootstrap.importing`, which makes imports faster than SGLang's own are.
bootstrap.prepare()

import torch  # noqa: E402
from sglang.srt.entrypoints.engine import Engine  # noqa: E402
from sglang.srt.managers import detokenizer_manager, scheduler  # noqa: E402
from sglang.srt.server_args import ServerArgs  # noqa: E402

_CPU_DEFAULTS: dict[str, Any] = {
    "device": "cpu",
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "disable_overlap_schedule": True,
    "disable_cuda_graph": True,
    "skip_server_warmup": True,
    "mem_fraction_static": 0.5,
}


def _run_scheduler(*args: Any, **kwargs: Any) -> None:
    """Run SGLang's scheduler process. Importing this module prepares torchvision before SGLang is imported."""
    scheduler.run_scheduler_process(*args, **kwargs)


def _run_detokenizer(*args: Any, **kwargs: Any) -> None:
    """Run SGLang's detokenizer process, likewise."""
    detokenizer_manager.run_detokenizer_process(*args, **kwargs)


class StockEngine(Engine):  # type: ignore[misc]
    """sglang.Engine; on a CPU, with a platform of native operators, torchvision's schemas and suitable arguments."""

    run_scheduler_process_func = staticmethod(_run_scheduler)
    run_detokenizer_process_func = staticmethod(_run_detokenizer)

    def __init__(self, **kwargs: Any) -> None:
        on_cpu = not torch.cuda.is_available()
        kwargs = {"log_level": "error", **(_CPU_DEFAULTS if on_cpu else {}), **kwargs}
        with platform(STOCK_CPU_PLATFORM if on_cpu else None):
            super().__init__(server_args=ServerArgs(**kwargs))
        self.own_processes = processes_of(self.get_all_child_pids())

    def shutdown(self) -> None:
        from sgl_batch.sglang_adapter.processes import end_processes

        end_processes(self)
