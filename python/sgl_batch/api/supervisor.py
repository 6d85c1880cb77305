"""Keeps an engine running: starts its process, starts it again after its death, and knows its state.

It knows no jobs and no HTTP. The restart policy decides when to give up, the progress watch whether an engine hangs.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sgl_batch.api.engine_endpoints import LoopbackEndpoints
from sgl_batch.api.engine_view import EngineView
from sgl_batch.api.progress_watch import ProgressWatch
from sgl_batch.api.restart_policy import RestartPolicy, SessionEnd
from sgl_batch.engine.engine_process import EngineHttp, EngineProcess
from sgl_batch.engine.line_channel import LineClient
from sgl_batch.errors import BAD_USAGE, EngineError

logger = logging.getLogger(__name__)

_STATS_EVERY_S = 1.0
_STOP_WITHIN_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineState:
    """The state of the engine. `phase`: starting, ready, stalled, restarting, failed (for good) or stopped.

    `since` is Unix time. `forward` names the forward pass of the model; None until the first engine is ready.
    """

    phase: str
    message: str | None
    since: float
    restarts: int
    forward: str | None = None


class EngineSupervisor:
    """Keeps an engine running. It is the `EngineSource` of the jobs.

    `is_refused`: the engine refuses the command line, so no start can help. `request_logs`: the directory of request
    logs (None: in `directory`, which is removed with the server).
    """

    def __init__(
        self,
        command: Sequence[str],
        directory: Path,
        *,
        stall_s: float,
        restart_stalled: bool,
        request_logs: Path | None = None,
    ) -> None:
        self._command, self._directory = command, directory
        self._request_logs = request_logs or directory / "request_logs"
        self._stall_s, self._restart_stalled = stall_s, restart_stalled
        self._process: EngineProcess | None = None
        self._ready: LineClient | None = None
        self._changed = asyncio.Condition()
        self._task: asyncio.Task[None] | None = None
        self._state = EngineState(phase="starting", message=None, since=time.time(), restarts=0)
        self._forward: str | None = None
        self.view = EngineView()
        self.is_refused = False
        self.num_engines = 1
        self.instances = None
        self.control = None
        self._endpoints: LoopbackEndpoints | None = None

    # For the jobs.

    def current(self) -> LineClient | None:
        """Return the engine that is ready now, or None."""
        return self._ready

    async def available(self, other_than: object | None = None) -> LineClient:
        """Wait for a ready engine other than `other_than`."""
        async with self._changed:
            while self._ready is None or self._ready is other_than:
                await self._changed.wait()
            return self._ready

    # For HTTP.

    @property
    def state(self) -> EngineState:
        """The state of the engine."""
        return self._state

    @property
    def http(self) -> EngineHttp | None:
        """Where the endpoints of the ready engine are, or None."""
        return self._process.http if self._ready is not None and self._process is not None else None

    def endpoints(self) -> LoopbackEndpoints | None:
        """Return the endpoints of the ready engine, or None."""
        return self._endpoints if self._ready is not None else None

    # For the server.

    def start(self) -> asyncio.Task[None]:
        """Begin to keep an engine running. The returned task ends when the supervisor gives up."""
        self._task = asyncio.create_task(self._keep_alive())
        return self._task

    async def stop(self) -> None:
        """End the engine: ask it to end, and kill it after 30 s."""
        self._set_phase("stopped", None)
        if self._process is not None:
            await self._process.stop(_STOP_WITHIN_S)
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})

    async def _keep_alive(self) -> None:
        policy = RestartPolicy()
        while True:
            error, end = await self._one_session()
            if self._state.phase == "stopped":
                return
            if error.code == BAD_USAGE:
                self._set_phase("failed", str(error))
                self.is_refused = True
                return
            delay_s = policy.delay_after(end)
            if delay_s is None:
                logger.error("the engine is not started again: %s", error)
                self._set_phase("failed", f"not started again: {error}")
                return
            logger.error("the engine is started again in %g s: %s", delay_s, error)
            self._set_phase("restarting", str(error), restarts=self._state.restarts + 1)
            await asyncio.sleep(delay_s)

    async def _one_session(self) -> tuple[EngineError, SessionEnd]:
        """Run one engine, from its start to its end."""
        self._process = process = EngineProcess(
            self._command, self._directory, self._state.restarts, self._request_logs
        )
        ready_at: list[float] = []
        arrived = asyncio.Event()

        def on_ready() -> None:
            ready_at.append(time.monotonic())
            arrived.set()

        self._endpoints = LoopbackEndpoints(process.http)
        watching = asyncio.create_task(self._watch(process, arrived))
        try:
            failure = await process.run(on_ready)
        finally:
            self._ready = None
            await self._endpoints.close()
            watching.cancel()
            await asyncio.wait({watching})
        if not watching.cancelled():
            watching.result()
        client = process.client
        return EngineError(failure.message, code=failure.code), SessionEnd(
            message=failure.message,
            lived_s=time.monotonic() - ready_at[0] if ready_at else 0.0,
            busy=client is not None and client.was_busy,
            num_answered=client.num_answered if client is not None else 0,
        )

    async def _watch(self, process: EngineProcess, arrived: asyncio.Event) -> None:
        """Publish the engine when it is ready, then read its statistics until it dies."""
        await arrived.wait()
        assert process.client is not None, "it is ready"
        async with self._changed:
            self._ready = client = process.client
            self._forward = client.forward
            self._set_phase("ready", None)
            self._changed.notify_all()
        logger.info("the engine is ready")
        self.view.begin()
        try:
            await self._look_after(process, client)
        except EngineError:
            return  # `EngineProcess.run` returns why the engine is dead

    async def _look_after(self, process: EngineProcess, client: LineClient) -> None:
        watch = ProgressWatch(self._stall_s, time.monotonic)
        # One reading at a time, and none is cancelled: the engine answers between two steps, in the order of requests.
        asking = asyncio.ensure_future(client.stats())
        try:
            while True:
                await asyncio.wait({asking}, timeout=_STATS_EVERY_S)
                counters = None
                if asking.done():
                    stats = asking.result()
                    counters = stats.counters
                    self.view.add(stats, time.time())
                    await asyncio.sleep(_STATS_EVERY_S)
                    asking = asyncio.ensure_future(client.stats())
                # An engine that does not answer has work that is not known here. A paused engine does no work.
                has_work = client.num_in_flight > 0 or self.view.has_sequences or counters is None
                watch.see(counters, has_work=has_work and not self.view.is_paused)
                self._judge(process, watch)
        finally:
            asking.cancel()

    def _judge(self, process: EngineProcess, watch: ProgressWatch) -> None:
        if watch.is_stalled and self._state.phase == "ready":
            message = f"the engine has work and has made no progress for {watch.still_s:.0f} s"
            logger.error("%s%s", message, "; it is ended" if self._restart_stalled else "")
            self._set_phase("stalled", message)
            if self._restart_stalled:
                process.kill()
        elif not watch.is_stalled and self._state.phase == "stalled":
            logger.info("the engine goes on")
            self._set_phase("ready", None)

    def _set_phase(self, phase: str, message: str | None, *, restarts: int | None = None) -> None:
        self._state = EngineState(
            phase=phase,
            message=message,
            since=time.time(),
            restarts=self._state.restarts if restarts is None else restarts,
            forward=self._forward,
        )
