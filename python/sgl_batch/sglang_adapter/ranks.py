"""SGLang's data-parallel controller, process groups and parallel state, as ranks of ours are built on them.

The controller polls without a pause; ours waits for messages, since on a small machine the ranks need the core.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any

from sgl_batch.sglang_adapter import bootstrap

with bootstrap.importing():
    import sglang.srt.managers.data_parallel_controller as controller_module
    import torch
    from sglang.srt.managers.data_parallel_controller import DataParallelController
    from sglang.srt.runtime_context import get_parallel
    from sglang.srt.utils.common import init_custom_process_group

__all__ = ["expert_shard", "new_process_group", "run_controller_with"]

_POLL_MS = 100


def expert_shard(rank: int, world_size: int) -> AbstractContextManager[Any]:
    """Models built inside have this rank's contiguous share of every layer's experts; nothing else is cut."""
    shard: AbstractContextManager[Any] = get_parallel().override(moe_ep_size=world_size, moe_ep_rank=rank)
    return shard


def new_process_group(backend: str, store: Any, *, rank: int, world_size: int, name: str, timeout_s: float) -> Any:
    """A process group of torch.distributed over the engine's ranks, apart from SGLang's own, which has one rank."""
    return init_custom_process_group(
        backend=backend,
        store=store,
        rank=rank,
        world_size=world_size,
        group_name=name,
        timeout=timedelta(seconds=timeout_s),
    )


def run_controller_with(
    on_wait: Callable[[list[Any]], None], on_start_failure: Callable[[int | None, str], None], **kwargs: Any
) -> None:
    """Run SGLang's data-parallel controller in this process; `on_wait(scheduler processes)` is called between messages.

    `on_start_failure(rank, what)` is called where a scheduler process ends before it is ready, for which SGLang would
    wait for ever.
    """

    class Controller(DataParallelController):  # type: ignore[misc]
        def launch_tensor_parallel_group(self, server_args: Any, port_args: Any, base: int, rank: Any) -> None:
            if server_args.device != "cpu":
                base %= torch.cuda.device_count()  # more ranks than GPUs share them in turns
            try:
                super().launch_tensor_parallel_group(server_args, port_args, base, rank)
            except (EOFError, KeyError, TypeError) as error:
                on_start_failure(rank, f"{type(error).__name__}: {error}")

        def dispatch_batch_generate(self, batch_req: Any) -> None:
            """Requests that name one rank stay one message, so that they are scheduled together."""
            named = {request.routed_dp_rank for request in batch_req}
            if len(named) == 1 and None not in named:
                controller_module.sock_send(self.workers[named.pop()], batch_req)
            else:
                super().dispatch_batch_generate(batch_req)

        def event_loop(self) -> None:
            while True:
                self.soft_watchdog.feed()
                if not self.recv_from_tokenizer.poll(_POLL_MS):
                    on_wait(self.scheduler_procs)
                    continue
                self._request_dispatcher(controller_module.sock_recv(self.recv_from_tokenizer))

    controller_module.DataParallelController = Controller
    controller_module.run_data_parallel_controller_process(**kwargs)
