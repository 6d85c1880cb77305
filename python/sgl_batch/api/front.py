"""Owns the start and the end of the server: the socket, the jobs, the engine's process and the HTTP server."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import socket
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from types import FrameType

import uvicorn
import uvloop
from fastapi import FastAPI

from sgl_batch.api.app import make_app
from sgl_batch.api.auth import AccessRules
from sgl_batch.api.engine_keeper import EngineKeeper
from sgl_batch.api.front_options import FrontOptions
from sgl_batch.api.http_protocol import StrictProtocol
from sgl_batch.api.pass_through import PassThrough
from sgl_batch.api.supervisor import EngineSupervisor
from sgl_batch.engine.engine_process import ENGINE_PROGRAM
from sgl_batch.errors import ConfigError
from sgl_batch.jobs.batch_service.service import BatchService
from sgl_batch.owned_directory import OwnedDirectory, remove_abandoned

logger = logging.getLogger(__name__)

_BACKLOG = 2048
_LONGEST_DIRECTORY = 80


KeeperFactory = Callable[[FrontOptions, Path], EngineKeeper]
"""Makes what keeps the engine running. It gets a private directory that is removed at the server's end."""


def one_engine(options: FrontOptions, directory: Path) -> EngineSupervisor:
    """Return the supervisor of one engine, which is a process of this server."""
    return EngineSupervisor(
        (*ENGINE_PROGRAM, *options.engine_argv),
        directory,
        stall_s=options.stall_s,
        restart_stalled=options.restart_stalled,
        request_logs=options.service.jobs_dir.resolve() / "request_logs",
    )


def serve(options: FrontOptions, make_keeper: KeeperFactory = one_engine) -> int:
    """Serve until stopped, and return the exit code. Raises ConfigError for options that cannot work."""
    # All files of the server and of its engine are private: they hold requests and answers.
    os.umask(0o077)
    logging.basicConfig(level=options.log_level.upper(), format="[%(asctime)s] %(message)s", force=True)
    # At its end uvicorn raises the signal again for the earlier handler, which has nothing left to do.
    for one in (signal.SIGTERM, signal.SIGINT):
        signal.signal(one, lambda *_: None)
    with _listen(options.host, options.port) as listener:
        return uvloop.run(_serve(options, make_keeper, listener))


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except OSError as error:
        raise ConfigError(f"the server cannot listen on --host {host} --port {port}: {error}") from error


async def _serve(options: FrontOptions, make_keeper: KeeperFactory, listener: socket.socket) -> int:
    async with AsyncExitStack() as ending:
        remove_abandoned("sgl-batch-")
        owned = OwnedDirectory.make("sgl-batch-server-")
        ending.callback(owned.remove)
        directory = str(owned.path)
        _check_socket_length(directory)
        keeper = make_keeper(options, owned.path)
        service = BatchService(options.service, keeper, num_engines=lambda: keeper.num_engines)
        engine = PassThrough(keeper.endpoints, lambda: keeper.state, keeper.control)
        rules = AccessRules(
            api_key=options.api_key,
            admin_api_key=options.admin_api_key,
            host=options.host,
            open_control=options.open_control,
            open_metrics=options.open_metrics,
        )
        stopping = _Stopping(service)
        server = _Server(_uvicorn_config(options, make_app(service, keeper, engine, rules)), stopping.begin)
        with server.capture_signals():
            await service.start()
            ending.push_async_callback(keeper.stop)
            supervising = keeper.start()
            ending.push_async_callback(stopping.done)
            stopping.started()
            gc.freeze()  # else the collector searches what was imported again and again, which costs more than a line
            return await _until_stopped(server, keeper, supervising, listener)


def _check_socket_length(directory: str) -> None:
    """Raise ConfigError where the directory's name is too long for sockets in it: the kernel takes 107 characters."""
    if len(directory) > _LONGEST_DIRECTORY:
        raise ConfigError(
            f"the directory of temporary files {directory} has a name of {len(directory)} characters, too long for the "
            f"names of sockets in it: set TMPDIR so that it has at most {_LONGEST_DIRECTORY}"
        )


async def _until_stopped(
    server: _Server, keeper: EngineKeeper, supervising: asyncio.Task[None], listener: socket.socket
) -> int:
    """Serve until asked to stop, also while there is no engine; but stop where no engine can ever start."""
    serving = asyncio.ensure_future(server.serve(sockets=[listener]))
    await asyncio.wait({serving, supervising}, return_when=asyncio.FIRST_COMPLETED)
    fault = supervising.exception() if supervising.done() else None
    if fault is not None or keeper.is_refused:
        server.should_exit = True
    await serving
    if fault is not None:
        raise fault
    return 1 if keeper.is_refused else 0


def _uvicorn_config(options: FrontOptions, app: FastAPI) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        log_level=options.log_level,
        lifespan="off",
        http=StrictProtocol,
        ws="none",
        server_header=False,
        ssl_certfile=options.ssl_certfile,
        ssl_keyfile=options.ssl_keyfile,
        ssl_keyfile_password=options.ssl_keyfile_password,
        ssl_ca_certs=options.ssl_ca_certs,
    )


class _Stopping:
    """Stops the jobs as soon as the server is asked to stop. Requests in progress are answered to their end."""

    def __init__(self, service: BatchService) -> None:
        self._service = service
        self._is_started = False
        self._task: asyncio.Task[None] | None = None

    def started(self) -> None:
        """Note that the service has started."""
        self._is_started = True

    def begin(self) -> None:
        """Give up the lines in flight. Idempotent."""
        if self._is_started and self._task is None:
            self._task = asyncio.create_task(self._service.stop())

    async def done(self) -> None:
        """Wait until all finished lines are committed."""
        self.begin()
        assert self._task is not None, "it has begun"
        await self._task


class _Server(uvicorn.Server):
    """Uvicorn's server, which calls `on_stop` when it is asked to stop."""

    def __init__(self, config: uvicorn.Config, on_stop: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_stop = on_stop
        self._loop = asyncio.get_running_loop()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin to stop. A signal calls this at any point."""
        super().handle_exit(sig, frame)
        self._loop.call_soon_threadsafe(self._on_stop)
