"""Several instances in the place of one engine: an `api.engine_keeper.EngineKeeper` of a pool and of its keeper."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from sgl_batch.api.engine_keeper import InstanceRow
from sgl_batch.api.engine_view import EngineView
from sgl_batch.api.supervisor import EngineState
from sgl_batch.control_plane.instances.host import Host, HostEndedError, PoolCalls
from sgl_batch.control_plane.instances.instance import InstanceView
from sgl_batch.control_plane.instances.instance_endpoints import InstanceEndpoints, MemberEndpoints
from sgl_batch.control_plane.instances.keeper import InstanceKeeper
from sgl_batch.control_plane.instances.placement import Needs
from sgl_batch.control_plane.instances.pool import InstancePool
from sgl_batch.control_plane.instances.records import InstanceRecords
from sgl_batch.control_plane.instances.seat import MemberView
from sgl_batch.control_plane.instances.service_control import ServiceControl
from sgl_batch.control_plane.instances.service_state import ServiceState
from sgl_batch.errors import EngineError
from sgl_batch.jobs.batch_service.settings import DEFAULT_MAX_IN_FLIGHT

logger = logging.getLogger(__name__)

_LOOK_EVERY_S = 1.0
INSTANCES_FAILED = "instances_failed"


class InstanceEngines:
    """The instances of one service. All methods are called on one event loop.

    Args:
        host: Starts and ends them.
        records: Remembers them.
        needs, count: What each takes of its node, and how many there are (None: as many as the nodes are for).
        close: Called last, in a thread: leaves the cluster.
        outlive: Whether the instances go on without this process.
        depth: The most lines that an instance has at a time.
        is_run: The instances are of one run. Its lines fail once all instances have, and nothing stays on the nodes.
    """

    def __init__(
        self,
        host: Host,
        records: InstanceRecords,
        *,
        needs: Needs,
        count: int | None,
        close: Callable[[], None],
        outlive: bool,
        depth: int = DEFAULT_MAX_IN_FLIGHT,
        is_run: bool = False,
    ) -> None:
        self._close, self._outlive, self._is_run = close, outlive, is_run
        self._pool = InstancePool(depth=depth, prepare=lambda member: self.control.prepare(member))
        self._endpoints = InstanceEndpoints(self._pool.loads)
        self.control = ServiceControl(
            self._pool.all_members,
            self._pool.forget_old_weights,
            # The engines of a cluster of its own end with the server.
            state=records.state if outlive else ServiceState(),
            keep=records.keep_state,
        )
        calls = PoolCalls(
            joined=lambda member, from_before: self._pool.join(member, from_before=from_before),
            left=self._pool.leave,
            draining=self._pool.drain,
        )
        self._keeper = InstanceKeeper(host, records, calls, needs=needs, count=count)
        self._pool.on_lost = self._keeper.lost
        self._task: asyncio.Task[None] | None = None
        self._since, self._phase = time.time(), ""
        self._was_ready = self._is_stopped = False
        self.view = EngineView()
        self.is_refused = False
        self.instances = _Control(self._keeper, self.rows)

    # For the jobs.

    def current(self) -> InstancePool | None:
        """Return all instances as one engine while one of them is ready, else None."""
        return self._pool.current()

    async def available(self, other_than: object | None = None) -> InstancePool:
        """Wait until an instance is ready."""
        return await self._pool.available(other_than)

    @property
    def num_engines(self) -> int:
        """How many instances take lines; at least 1."""
        return max(1, sum(one.phase == "ready" for one in self._pool.members()))

    # For HTTP.

    def endpoints(self) -> MemberEndpoints | None:
        """Return the endpoints of the instance that is to answer the next request; None while none is ready."""
        return self._endpoints.choose()

    def rows(self) -> list[InstanceRow]:
        """Return the instances for people."""
        members = {one.name: one for one in self._pool.members()}
        return [as_row(one, members.get(one.name)) for one in self._keeper.views()]

    @property
    def state(self) -> EngineState:
        """The state of all of them: ready while one of them is."""
        rows = self.rows()
        phase, message = ("stopped", None) if self._is_stopped else summary(rows, was_ready=self._was_ready)
        if phase != self._phase:
            self._phase, self._since = phase, time.time()
        stats = self.view.stats
        return EngineState(
            phase=phase,
            message=message,
            since=self._since,
            restarts=sum(row.restarts + max(0, row.incarnation - 1) for row in rows),
            forward=(stats.forward or None) if stats is not None else None,
        )

    # For the server.

    def start(self) -> asyncio.Task[None]:
        """Begin to keep them running. The returned task ends when no instance can ever answer."""
        self._task = asyncio.create_task(self._keep())
        return self._task

    async def stop(self) -> None:
        """Leave the cluster. Instances that outlive this process go on with the lines that they have."""
        self._is_stopped = True
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})
        await self._pool.close()
        await self._keeper.stop(end=not self._outlive, forget=self._is_run)
        if self._outlive:
            logger.info("the instances go on; a server with the same --jobs-dir finds them")
        await asyncio.to_thread(self._close)

    async def _keep(self) -> None:
        await self._keeper.start()
        while True:
            await asyncio.sleep(_LOOK_EVERY_S)
            try:
                self._keeper.check()
            except HostEndedError as error:
                if self._is_run:
                    self._pool.fail(EngineError(str(error), code=INSTANCES_FAILED))
                raise
            self.view.add(self._pool.reported_stats(), time.time())
            rows = self.rows()
            self._was_ready = self._was_ready or any(row.phase == "ready" for row in rows)
            if not self._was_ready and rows and all(row.phase == "failed" and not row.restarts for row in rows):
                # An engine that can be started again is.
                logger.error("no instance can start: %s", rows[0].message)
                self.is_refused = True
                return
            state = self.state
            if self._is_run and state.phase == "failed":
                self._pool.fail(EngineError(f"all instances have failed: {state.message}", code=INSTANCES_FAILED))


class _Control:
    """The instances as the routes use them."""

    def __init__(self, keeper: InstanceKeeper, rows: Callable[[], list[InstanceRow]]) -> None:
        self._keeper, self.rows = keeper, rows

    async def add(self) -> InstanceRow:
        return as_row(await self._keeper.add(), None)

    async def drain(self, name: str) -> InstanceRow:
        return self._row(await self._keeper.drain(name))

    async def remove(self, name: str) -> InstanceRow:
        return self._row(await self._keeper.remove(name))

    def _row(self, view: InstanceView) -> InstanceRow:
        return next((row for row in self.rows() if row.name == view.name), as_row(view, None))


def as_row(view: InstanceView, member: MemberView | None) -> InstanceRow:
    """Return an instance for people, from what its keeper and the pool know of it."""
    is_running = member is not None and member.incarnation == view.incarnation
    phase, message = view.phase, view.message
    if member is not None and is_running and phase == "running":
        phase, message = member.phase, member.message
    return InstanceRow(
        name=view.name,
        incarnation=view.incarnation,
        node=view.node,
        cores=len(view.cores),
        gpus=view.gpus,
        phase="starting" if phase == "running" else phase,
        message=message,
        restarts=member.restarts if member is not None and is_running else 0,
        in_flight=member.in_flight if member is not None and is_running else 0,
        answered=member.answered if member is not None and is_running else 0,
        lines_per_s=round(member.lines_per_s, 3) if member is not None and is_running else 0.0,
    )


def summary(rows: list[InstanceRow], *, was_ready: bool) -> tuple[str, str | None]:
    """Return the phase of all instances together, and what is said of those that are not ready."""
    phases = [row.phase for row in rows]
    others = [row for row in rows if row.phase not in ("ready", "draining", "drained", "removing")]
    what = "; ".join(f"{row.name} is {row.phase}" + (f" ({row.message})" if row.message else "") for row in others[:3])
    more = f" and {len(others) - 3} more" if len(others) > 3 else ""
    message = f"{phases.count('ready')} of {len(rows)} instances are ready: {what}{more}" if others else None
    if "ready" in phases:
        return "ready", message
    if "stalled" in phases:
        return "stalled", message
    if phases and all(one == "failed" for one in phases):
        return "failed", message
    return "restarting" if was_ready else "starting", message
