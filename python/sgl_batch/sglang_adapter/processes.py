"""Adapts SGLang's processes: its engine, HTTP server and process functions.

SGLang's process functions name their classes in their modules, so a scheduler process of ours replaces the name
Scheduler before it runs SGLang's function. In the parent process, RankedEngine replaces the process function of the
controller of several ranks while SGLang starts it, and puts sockets into a private directory.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import multiprocessing
import os
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from sgl_batch.sglang_adapter import bootstrap, fork_server
from sgl_batch.sglang_adapter.child_processes import platform, start_method_of
from sgl_batch.sglang_adapter.faults import ending_by
from sgl_batch.sglang_adapter.http_errors import refuse_wrong_bodies
from sgl_batch.sglang_adapter.internal_key import OnlyWithKey
from sgl_batch.sglang_adapter.names import CPU_ATTENTION, SAFETENSORS, TRITON_ATTENTION
from sgl_batch.sglang_adapter.ordered_outputs import ReceivedInOrder
from sgl_batch.sglang_adapter.private_ports import PrivatePorts, temporary_files_in
from sgl_batch.sglang_adapter.process_trees import end_trees, processes_of
from sgl_batch.sglang_adapter.refusals import Check, on_http_server

with bootstrap.importing():
    import sglang.srt.entrypoints.engine as engine_module
    import sglang.srt.managers.detokenizer_manager as detokenizer_module
    import sglang.srt.managers.scheduler as scheduler_module
    import sglang.srt.mem_cache.allocation as allocation_module
    import sglang.srt.model_executor.forward_batch_info as forward_batch_module
    from sglang.srt.entrypoints.engine import Engine
    from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqInput
    from sglang.srt.managers.load_snapshot import shm_path_for
    from sglang.srt.server_args import ServerArgs
    from sglang.srt.utils import (
        MultiprocessingSerializer,
        kill_process_tree,
        normalize_serialized_named_tensor_payloads,
    )
    from sglang.srt.utils.common import kill_itself_when_parent_died

__all__ = [
    "Engine",
    "Launched",
    "RankedEngine",
    "ServerArgs",
    "argument_names",
    "close_sockets",
    "end_processes",
    "end_trees",
    "end_with_parent",
    "kill_process_tree",
    "launch_subprocesses",
    "load_file",
    "merge_config_file",
    "platform",
    "processes_of",
    "run_detokenizer_with",
    "run_scheduler_with",
    "serve_http",
    "server_args_of",
    "sockets_of",
]


def _is_no_dump(record: logging.LogRecord) -> bool:
    """Return whether a log record is not SGLang's line of all its hundreds of arguments, which only debugging needs."""
    is_dump = str(record.msg).startswith("server_args=")
    return not is_dump or logging.getLogger().isEnabledFor(logging.DEBUG)


engine_module.logger.addFilter(_is_no_dump)


def _support_triton(backend: str) -> bool:
    return backend not in ("torch_native", "intel_amx", CPU_ATTENTION)


def server_args_of(arguments: dict[str, Any], *, sinks: bool) -> Any:
    """Make SGLang's ServerArgs. Its errors are SGLang's.

    `sinks`: whether the model's attention has sinks. SGLang accepts only some of its own backends for them. Our backend
    computes sinks, so it has the name of one of these during SGLang's checks.
    """
    args = ServerArgs.__new__(ServerArgs)
    if sinks:
        own = args._resolved_attention_backends
        args._resolved_attention_backends = lambda: tuple(
            TRITON_ATTENTION if name == CPU_ATTENTION else name for name in own()
        )
    args.__init__(**arguments)
    args.__dict__.pop("_resolved_attention_backends", None)
    return args


def run_scheduler_with(
    scheduler_class: Callable[..., Any], sampler: Callable[[], Any], end: Callable[[Exception], NoReturn], *args: Any
) -> None:
    """Run SGLang's scheduler process function with `scheduler_class` and `sampler`, in a process of its own.

    `end(error)` ends the process after an error; SGLang would print it and send a signal to its parent.

    It also registers that our CPU attention backend does not use Triton; SGLang knows only its own backends' names.
    """
    from sglang.srt.layers.sampler import register_sampler_backend

    scheduler_module.get_exception_traceback = ending_by(end)
    scheduler_module.Scheduler = scheduler_class
    allocation_module.support_triton = _support_triton
    forward_batch_module.support_triton = _support_triton
    server_args = args[0]
    register_sampler_backend(server_args.sampling_backend, sampler)
    scheduler_module.run_scheduler_process(*args)


def run_detokenizer_with(end: Callable[[Exception], NoReturn], *args: Any, **kwargs: Any) -> None:
    """Run SGLang's detokenizer process, likewise, except that it reads the parts of each answer in order."""
    detokenizer_module.get_exception_traceback = ending_by(end)
    detokenizer_module.sock_recv = ReceivedInOrder(detokenizer_module.sock_recv)
    detokenizer_module.run_detokenizer_process(*args, **kwargs)


def load_file(port_args: Any) -> Path:
    """Return the shared-memory file in which SGLang's schedulers publish their load; a killed engine leaves it."""
    return Path(shm_path_for(port_args.instance_id))


def end_with_parent() -> None:
    """Let this child process be killed when its parent ends, also if the parent has ended already.

    SGLang's own function does not notice a parent that ended before the call.
    """
    kill_itself_when_parent_died()
    if fork_server.init_forked_process():
        return
    parent = multiprocessing.parent_process()
    assert parent is not None, "this is no child process"
    if os.getppid() != parent.pid:
        os._exit(1)


class RankedEngine(Engine):  # type: ignore[misc]
    """SGLang's engine with our controller of several ranks, start methods and process watch.

    The scheduler process function has an owner with these attributes. `controller` starts several ranks: SGLang's own
    controller polls without a pause, and waits forever for a rank that ends while it starts. `start_method` says how
    processes start: SGLang always starts them anew. `processes` watches them: SGLang's watch sends this process a
    signal when one ends. `directory` has all sockets.
    """

    @classmethod
    def _launch_scheduler_processes(cls, server_args: Any, port_args: Any, run_scheduler_process_func: Any) -> Any:
        run, own = run_scheduler_process_func, engine_module.run_data_parallel_controller_process
        engine_module.run_data_parallel_controller_process = run.controller
        try:
            with start_method_of(run):
                result, started = super()._launch_scheduler_processes(server_args, port_args, run)
        finally:
            engine_module.run_data_parallel_controller_process = own
        run.processes.add("the scheduler" if server_args.dp_size == 1 else "the controller of the ranks", started)
        return result, started

    @classmethod
    def _launch_subprocesses(cls, server_args: Any, *, run_scheduler_process_func: Any, **functions: Any) -> Any:
        """Start processes as SGLang does, with all sockets in the owner's directory."""
        run, own = run_scheduler_process_func, engine_module._wait_for_scheduler_ready
        engine_module._wait_for_scheduler_ready = run.processes.await_ready
        try:
            *launched, watchdog = super()._launch_subprocesses(
                server_args,
                run_scheduler_process_func=run,
                port_args=PrivatePorts(run.directory, "e").init_new(server_args),
                **functions,
            )
        finally:
            engine_module._wait_for_scheduler_ready = own
        watchdog.stop()
        return (*launched, run.processes)

    def update_weights_from_tensor(
        self, named_tensors: Any, load_format: str | None = None, flush_cache: bool = True
    ) -> Any:
        """Update weights as SGLang does, with the tensors serialized once for each rank.

        SGLang serializes them once for each tensor-parallel rank only. With the load_format "safetensors",
        `named_tensors` is a list of the bytes of safetensors files: one for all ranks, or one for each.
        """
        if load_format not in ("flattened_bucket", SAFETENSORS):
            payloads = [MultiprocessingSerializer.serialize(named_tensors) for _ in range(self.server_args.dp_size)]
        else:
            payloads = normalize_serialized_named_tensor_payloads(named_tensors)
        asked = UpdateWeightsFromTensorReqInput(
            serialized_named_tensors=payloads, load_format=load_format, flush_cache=flush_cache
        )
        return self.loop.run_until_complete(self.tokenizer_manager.update_weights_from_tensor(asked, None))

    @classmethod
    def _launch_detokenizer_subprocesses(
        cls, server_args: Any, port_args: Any, run_detokenizer_process_func: Any
    ) -> Any:
        run = run_detokenizer_process_func.__self__
        several = server_args.detokenizer_worker_num > 1  # then each has its own socket
        private = temporary_files_in(run.directory) if several else nullcontext()
        with start_method_of(run_detokenizer_process_func), private:
            started, names = super()._launch_detokenizer_subprocesses(
                server_args, port_args, run_detokenizer_process_func
            )
        run.processes.add("the detokenizer", started)
        return started, names


@dataclass(frozen=True, slots=True, kw_only=True)
class Launched:
    """The results of starting SGLang's process tree."""

    tokenizer_manager: Any
    template_manager: Any
    port_args: Any
    scheduler_infos: list[dict[str, Any]]
    watchdog: Any


def launch_subprocesses(server_args: Any, **functions: Callable[..., Any]) -> Launched:
    """Start SGLang's process tree with our process functions, and wait until the model is loaded."""
    tokenizer, template, ports, schedulers, watchdog = RankedEngine._launch_subprocesses(server_args, **functions)
    return Launched(
        tokenizer_manager=tokenizer,
        template_manager=template,
        port_args=ports,
        scheduler_infos=schedulers.scheduler_infos,
        watchdog=watchdog,
    )


def serve_http(
    server_args: Any,
    launched: Launched,
    check: Check,
    lifespan: Callable[[], AbstractAsyncContextManager[None]] | None = None,
    routes: Sequence[Any] = (),
) -> None:
    """Run SGLang's HTTP server (on uvloop) over a started process tree until it is stopped.

    All its endpoints need the `api_key`. `check` raises RefusalError for a request of the OpenAI endpoints that is
    refused. `lifespan` is entered in the server's event loop when the server starts, and left when it stops; after
    that, the end of a child process is not a crash. `routes` (Starlette's) replace SGLang's routes of the same paths.
    """
    from sglang.srt.entrypoints.http_server import _execute_server_warmup, _setup_and_run_http_server, app

    own, own_routes = app.router.lifespan_context, list(app.router.routes)
    paths = {route.path for route in routes}
    app.router.routes[:] = [*routes, *(one for one in own_routes if getattr(one, "path", None) not in paths)]

    @asynccontextmanager
    async def both(served: Any) -> AsyncIterator[Any]:
        async with own(served) as state, lifespan() if lifespan is not None else nullcontext():
            with on_http_server(check):
                yield state

    assert server_args.api_key, "the front sends its key"
    app.add_middleware(OnlyWithKey, key=server_args.api_key)
    app.router.lifespan_context = both
    undo = refuse_wrong_bodies(app)
    try:
        _setup_and_run_http_server(
            server_args,
            launched.tokenizer_manager,
            launched.template_manager,
            launched.port_args,
            launched.scheduler_infos,
            launched.watchdog,
            execute_warmup_func=_execute_server_warmup,
        )
    finally:
        app.router.lifespan_context = own
        app.router.routes[:] = own_routes
        undo()
        launched.watchdog.stop()


def end_processes(engine: Any) -> None:
    """End an engine's own processes. SGLang's shutdown would end every child of this process, also other engines."""
    manager = engine.tokenizer_manager
    if manager is not None and manager._subprocess_watchdog is not None:
        manager._subprocess_watchdog.stop()
    sockets = [] if manager is None else sockets_of(manager)
    for task in getattr(manager, "asyncio_tasks", ()):
        if _runs_here(task):
            task.cancel()  # it reads a socket that is closed below; zmq would report that
    if getattr(engine, "send_to_rpc", None) is not None:
        sockets.append(engine.send_to_rpc)
        engine.send_to_rpc = None
    close_sockets(sockets)
    if manager is not None:
        manager.load_snapshot_reader.close()
    end_trees(getattr(engine, "own_processes", ()))


def _runs_here(task: asyncio.Task[Any]) -> bool:
    """Return whether a task belongs to the event loop that runs now, in this thread."""
    try:
        return task.get_loop() is asyncio.get_running_loop()
    except RuntimeError:
        return False


def sockets_of(manager: Any) -> list[Any]:
    """Return the sockets of a tokenizer manager."""
    found = (getattr(manager, name, None) for name in ("recv_from_detokenizer", "send_to_scheduler"))
    return [socket for socket in found if socket is not None]


def close_sockets(sockets: list[Any]) -> None:
    """Close sockets whose peers are gone, and their contexts with their threads.

    A context that is collected as garbage with an open socket would wait forever.
    """
    for socket in sockets:
        with suppress(RuntimeError):  # a task that waits on it may belong to a closed event loop
            socket.close(linger=0)
    for context in {id(socket.context): socket.context for socket in sockets}.values():
        if all(socket.closed for socket in sockets if socket.context is context):
            context.term()


def argument_names() -> tuple[str, ...]:
    """Return the names of SGLang's arguments."""
    return tuple(field.name for field in dataclasses.fields(ServerArgs))


def merge_config_file(parser: Any, argv: list[str]) -> list[str]:
    """Merge SGLang's --config FILE into `argv`."""
    if "--config" not in argv:
        return argv
    from sglang.srt.server_args_config_parser import ConfigArgumentMerger

    merged: list[str] = ConfigArgumentMerger(parser).merge_config_with_args(argv)
    return merged
