"""Adapts SGLang's data-parallel controller, process groups and parallel state for our ranks.

SGLang's controller polls without a pause; ours waits for messages, because on a small machine the ranks need the core.
SGLang's waits forever for a rank that ends while it starts; ours shows each rank's process from its start to a watch.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

from sgl_batch.core.dealing import WorkDealer
from sgl_batch.sglang_adapter import bootstrap
from sgl_batch.sglang_adapter.faults import ending_by
from sgl_batch.sglang_adapter.private_ports import PrivatePorts, hold_port, on_this_machine

with bootstrap.importing():
    import sglang.srt.managers.data_parallel_controller as controller_module
    import torch
    from sglang.srt.managers.data_parallel_controller import DataParallelController
    from sglang.srt.runtime_context import get_parallel
    from sglang.srt.utils.common import init_custom_process_group

__all__ = ["expert_shard", "new_process_group", "run_controller_with"]

_POLL_MS = 100


def expert_shard(shard: int, num_shards: int) -> AbstractContextManager[Any]:
    """Inside, SGLang builds models with one contiguous shard of every layer's experts; nothing else is split."""
    cut: AbstractContextManager[Any] = get_parallel().override(moe_ep_size=num_shards, moe_ep_rank=shard)
    return cut


def new_process_group(backend: str, store: Any, *, rank: int, world_size: int, name: str, timeout_s: float) -> Any:
    """Make a process group of torch.distributed over the engine's ranks. SGLang's own group has one rank only."""
    with on_this_machine():
        return init_custom_process_group(
            backend=backend,
            store=store,
            rank=rank,
            world_size=world_size,
            group_name=name,
            timeout=timedelta(seconds=timeout_s),
        )


def _tokens_of(request: Any) -> int:
    """Return the tokens of a request's prompt, and those that it may generate, as far as it says so."""
    prompt = 0 if request.input_ids is None else len(request.input_ids)
    return prompt + (getattr(request.sampling_params, "max_new_tokens", None) or 0)


def run_controller_with(
    processes: dict[int, list[Any]],
    on_start_failure: Callable[[int, str], None],
    end: Callable[[Exception], NoReturn],
    directory: Path,
    **kwargs: Any,
) -> None:
    """Run SGLang's data-parallel controller in this process; its sockets are in `directory`.

    `processes`: gets the scheduler process of each rank as soon as it runs; another thread may read it.
    `on_start_failure(rank, what)` is called, in any thread, if a rank cannot be started, and ends this process.
    `end(error)` ends it after any other error.
    """

    class Controller(DataParallelController):  # type: ignore[misc]
        dealer: WorkDealer | None = None

        def round_robin_scheduler(self, request: Any) -> None:
            """Send a request to the rank that it names, or to the one with the least predicted work."""
            self.dealer = self.dealer or WorkDealer(len(self.workers))
            if request.routed_dp_rank is None:
                controller_module.sock_send(self.workers[self.dealer.deal(_tokens_of(request))], request)
                return
            super().round_robin_scheduler(request)
            self.dealer.count(request.routed_dp_rank, _tokens_of(request))

        def launch_tensor_parallel_group(self, server_args: Any, port_args: Any, base: int, rank: int) -> None:
            """Start one rank. SGLang calls this for each rank in a thread, which waits until the rank is ready."""
            launcher: Any = copy.copy(self)
            launcher.scheduler_procs = processes[rank] = []
            if server_args.device != "cpu":
                base %= torch.cuda.device_count()  # more ranks than GPUs share them in turns
            try:
                DataParallelController.launch_tensor_parallel_group(launcher, server_args, port_args, base, rank)
            except Exception as error:
                on_start_failure(rank, f"{type(error).__name__}: {error}")
                raise
            self.scheduler_procs += launcher.scheduler_procs
            self.max_total_num_tokens = launcher.max_total_num_tokens
            self.max_req_input_len = launcher.max_req_input_len

        def dispatch_batch_generate(self, batch_req: Any) -> None:
            """Send requests for one rank in one message, so that they are scheduled together."""
            named = {request.routed_dp_rank for request in batch_req}
            if len(named) == 1 and None not in named:
                rank = named.pop()
                controller_module.sock_send(self.workers[rank], batch_req)
                self.dealer = self.dealer or WorkDealer(len(self.workers))
                self.dealer.count(rank, sum(map(_tokens_of, batch_req)))
            else:
                super().dispatch_batch_generate(batch_req)

        def event_loop(self) -> None:
            while True:
                self.soft_watchdog.feed()
                if self.recv_from_tokenizer.poll(_POLL_MS):
                    self._request_dispatcher(controller_module.sock_recv(self.recv_from_tokenizer))

    controller_module.get_exception_traceback = ending_by(end)
    controller_module.DataParallelController = Controller
    controller_module.PortArgs = PrivatePorts(directory, "r")
    controller_module.bind_port = hold_port
    controller_module.run_data_parallel_controller_process(**kwargs)
