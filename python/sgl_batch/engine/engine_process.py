"""Owns one engine process, seen from the server: its start, the connection to it, its end.

The supervisor decides whether another one follows.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import signal
import socket
import sys
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sgl_batch.engine.line_channel import LineClient
from sgl_batch.engine.line_frames import Failed, FrameError, Frames, FromEngine, Ready
from sgl_batch.engine.parent_link import ParentLink
from sgl_batch.engine.process_groups import group_ended
from sgl_batch.errors import EngineError
from sgl_batch.owned_directory import remove_tree

logger = logging.getLogger(__name__)

ENGINE_PROGRAM = (sys.executable, "-m", "sgl_batch.launch_engine")
# How long a process may take to end after it has closed its connection.
_END_WITHIN_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineHttp:
    """The address of SGLang's endpoints of one engine, and the key for them."""

    base_url: str
    api_key: str


class EngineProcess:
    """One process with one engine, from its start to its end. `run` is called once.

    `client` stands for the engine: None until it is ready, then the same object to the end, when all its calls raise
    EngineError. `http` says where SGLang's endpoints are. They answer while the engine is ready.

    Args:
        command: The program and the engine's flags. `--host` and `--port` of loopback are added to it.
        directory: The server's own directory. The process gets a new directory in it, removed at its end, for its
            socket and its temporary files.
        number: Distinguishes the engines of one server: 0, 1, ...
        request_logs: The directory of request logs.
    """

    def __init__(self, command: Sequence[str], directory: Path, number: int, request_logs: Path) -> None:
        self._command, self._request_logs = command, request_logs
        self._front_directory = directory
        self._directory = directory / f"engine-{number}"
        self._socket = str(self._directory / "lines.sock")
        self._port = free_port()
        self._process: asyncio.subprocess.Process | None = None
        self._frames: asyncio.Future[Frames[FromEngine]] = asyncio.get_running_loop().create_future()
        self.http = EngineHttp(base_url=f"http://127.0.0.1:{self._port}", api_key=secrets.token_urlsafe(32))
        self.client: LineClient | None = None

    async def run(self, on_ready: Callable[[], None]) -> Failed:
        """Start the process, and return why it ended.

        When this returns, no process of the session runs (except one that the kernel has not ended 10 s after SIGKILL),
        its directory is removed, and every call of `client` raises EngineError. Cancelling the call kills the process,
        and then leaves `client` without its error.

        Args:
            on_ready: Called once, on the event loop, when the engine answers and `client` is set.

        Returns:
            The message and code with which the engine reported its failure, or else how its process was seen to end.
        """
        server = None
        try:
            self._directory.mkdir(mode=0o700)
            server = await asyncio.start_unix_server(self._connected, self._socket)
            await self._start()
            failure = await self._reap(await self._converse(on_ready))
        except OSError as error:  # no process, no memory or no room on the disk is left for it
            failure = Failed(message=f"the engine's process cannot be started: {error}", code=None)
        finally:
            try:
                await _to_its_end(self._end_all())
            finally:
                if server is not None:
                    server.close()
                if self._frames.done():
                    self._frames.result().close()
                remove_tree(self._directory)
        if self.client is not None:
            self.client.fail(EngineError(failure.message, code=failure.code))
        return failure

    def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._frames.done():
            writer.close()
        else:
            self._frames.set_result(Frames(reader, writer, FromEngine))

    async def _start(self) -> None:
        self._process = await asyncio.create_subprocess_exec(
            *(*self._command, "--host", "127.0.0.1", "--port", str(self._port)),
            stdin=asyncio.subprocess.PIPE,
            start_new_session=True,
            env={**os.environ, "TMPDIR": str(self._directory)},
        )
        link = ParentLink(
            socket=self._socket,
            directory=str(self._front_directory),
            api_key=self.http.api_key,
            parent_pid=os.getpid(),
            request_logs=str(self._request_logs),
        )
        assert self._process.stdin is not None, "standard input is a pipe"
        # It stays open: when it closes, the engine's process knows that this one has ended.
        self._process.stdin.write(link.encode())

    async def _converse(self, on_ready: Callable[[], None]) -> Failed | None:
        """Read messages of the process until it ends. Return the failure that it reported, if any."""
        assert self._process is not None, "the process has started"
        ended = asyncio.ensure_future(self._process.wait())
        try:
            waits: set[asyncio.Future[Any]] = {ended, self._frames}
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            if not self._frames.done():
                return None
            frames = self._frames.result()
            try:
                first = await frames.read()
                if not isinstance(first, Ready):
                    return first if isinstance(first, Failed) else None
                self.client = LineClient(frames, first.served_model_names, first.forward, first.plan_rates)
                on_ready()
                return await self.client.read_answers()
            except FrameError as error:
                logger.exception("the engine's process has sent bytes that are not a message")
                return Failed(message=str(error), code=None)
        finally:
            ended.cancel()

    async def _reap(self, failure: Failed | None) -> Failed:
        """Wait for the end of a process that has closed its connection. Return why it ended."""
        assert self._process is not None, "the process has started"
        with suppress(TimeoutError):
            await asyncio.wait_for(self._process.wait(), _END_WITHIN_S)
        if failure is not None:
            return failure
        return Failed(message=self._how_it_ended(), code=None)

    def _how_it_ended(self) -> str:
        when = "before it was ready" if self.client is None else "while it served"
        code = self._process.returncode if self._process is not None else None
        if code is None:
            return f"the engine's process closed its connection {when} and did not end"
        if code < 0:
            return f"the engine's process was ended by {signal.Signals(-code).name} {when}"
        return f"the engine's process ended with exit code {code} {when}; its own messages are in the log"

    async def stop(self, grace_s: float) -> None:
        """Ask the process to end, and kill it after `grace_s` seconds. `run` returns afterwards."""
        if self._process is None or self._process.returncode is not None:
            return
        with suppress(ProcessLookupError):
            self._process.terminate()
        try:
            await asyncio.wait_for(self._process.wait(), grace_s)
        except TimeoutError:
            logger.warning("the engine's process did not end within %g s and is killed", grace_s)
            self.kill()

    async def _end_all(self) -> None:
        """Kill what is left of the process's session, and wait until it has ended: then its memory is free."""
        self.kill()
        if self._process is not None and (left := await group_ended(self._process.pid, _END_WITHIN_S)):
            logger.error("processes %s of the engine still run %g s after they were killed", left, _END_WITHIN_S)

    def kill(self) -> None:
        """Kill the process and all processes that it started: they are one session. Idempotent."""
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)


async def _to_its_end(work: Coroutine[Any, Any, None]) -> None:
    """Wait for `work` to its end. A cancellation meanwhile takes effect after that."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await task
        raise


def free_port() -> int:
    """Return a port of loopback on which no process listens now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
