"""Stock SGLang with the smallest shim that lets it start on a CPU: its own classes, to compare ourselves with."""

from __future__ import annotations

from typing import Any

from sgl_batch.sglang_adapter import bootstrap

bootstrap.prepare()

import torch  # noqa: E402

from sgl_batch.sglang_adapter import processes  # noqa: E402
from sgl_batch.sglang_adapter.names import STOCK_CPU_PLATFORM  # noqa: E402

_CPU_DEFAULTS: dict[str, Any] = {
    "device": "cpu",
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "disable_overlap_schedule": True,
    "disable_cuda_graph": True,
    "skip_server_warmup": True,
    "mem_fraction_static": 0.5,
}


def _run_detokenizer(*args: Any, **kwargs: Any) -> None:
    """SGLang's detokenizer process; being here, its module prepared torchvision before SGLang was imported."""
    processes.run_detokenizer_process(*args, **kwargs)


class StockEngine(processes.Engine):  # type: ignore[misc]
    """sglang.Engine. On a CPU: a platform of native operators, torchvision's schemas, and arguments it can run."""

    run_scheduler_process_func = staticmethod(processes.run_scheduler_process)
    run_detokenizer_process_func = staticmethod(_run_detokenizer)

    def __init__(self, **kwargs: Any) -> None:
        on_cpu = not torch.cuda.is_available()
        kwargs = {"log_level": "error", **(_CPU_DEFAULTS if on_cpu else {}), **kwargs}
        with processes.platform(STOCK_CPU_PLATFORM if on_cpu else None):
            super().__init__(server_args=processes.ServerArgs(**kwargs))

    def shutdown(self) -> None:
        processes.end_processes(self)
