"""Owns the lines in flight: keeps the engine supplied with lines of all jobs, and goes on with the next engine.

It does not decide whose line is next (fair_share), which suspects run together (bisect_suspects), or when a job is over
(lifecycle_driver).
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from functools import partial

from sgl_batch.core.answers import LineResponse
from sgl_batch.errors import EngineError
from sgl_batch.jobs.batch_service.active_job import ActiveJob
from sgl_batch.jobs.batch_service.committer import Committer
from sgl_batch.jobs.batch_service.counters import ServiceCounters
from sgl_batch.jobs.batch_service.engine_session import EngineSession, LineInFlight
from sgl_batch.jobs.batch_service.engine_shares import EngineShares
from sgl_batch.jobs.batch_service.fair_share import Turn, charge, join, next_turn
from sgl_batch.jobs.batch_service.finished_line import FinishedLine, answered, refused
from sgl_batch.jobs.batch_service.input_reader import Line
from sgl_batch.jobs.batch_service.partial_outputs import PartialOutputs
from sgl_batch.jobs.batch_service.service_pace import ServicePace
from sgl_batch.jobs.batch_service.settings import ServiceSettings
from sgl_batch.jobs.batch_service.storage_guard import StorageGuard
from sgl_batch.jobs.batch_service.suspect_queue import SuspectGroup, SuspectQueue
from sgl_batch.jobs.line_engine import EngineSource
from sgl_batch.jobs.request_line import RefusedLine, RequestLine
from sgl_batch.jobs.result_lines import engine_crashed_response, result_token

REPLACED_WAIT_S = 0.02  # after an engine that ended without a death: the supervisor may still report it as current
DEATHS_ALONE = 2  # a line under which so many engines die while it runs alone is failed


class Dispatcher:
    """Gives the lines of all jobs to the engine that runs now.

    A line is in flight from its start until its result line is committed or it is given up.
    """

    def __init__(
        self,
        settings: ServiceSettings,
        engines: EngineSource,
        committer: Committer,
        suspects: SuspectQueue,
        guard: StorageGuard,
        counters: ServiceCounters,
        clock: Callable[[], float],
        num_engines: Callable[[], int],
    ) -> None:
        self.num_in_flight = 0
        self.in_flight_bytes = 0
        self.partial_outputs = PartialOutputs()
        self._settings = settings
        self._engines = engines
        self._committer = committer
        self._suspects = suspects
        self._guard = guard
        self._counters = counters
        self._clock, self._num_engines = clock, num_engines
        self._pace = ServicePace(clock())
        self.engine_shares = EngineShares(clock)
        self._jobs: dict[int, ActiveJob] = {}
        self._session: EngineSession | None = None
        self._fills: dict[ActiveJob, asyncio.Task[None]] = {}
        self._deaths_alone: Counter[int] = Counter()  # by group
        self._wake = asyncio.Event()
        guard.subscribe(self._wake.set)

    def add(self, job: ActiveJob) -> None:
        """Start the job's lines from now on."""
        join(job.share, (one.share for one in self._jobs.values()), self._clock())
        self._jobs[job.row.seq] = job
        self._wake.set()

    async def withdraw(self, job: ActiveJob) -> None:
        """Give up what the job has in flight. When this returns, all its answers are committed."""
        job.accepts_results = False
        self._jobs.pop(job.row.seq, None)
        if job in self._fills:
            self._fills[job].cancel()
        if self._session is not None:
            await self._session.drop(job)
        self.partial_outputs.forget_job(job.row.seq)
        await self._committer.flush()

    async def run(self) -> None:
        """Start lines until cancelled; then everything in flight is given up."""
        session: EngineSession | None = None
        try:
            while True:
                found_dead = session.engine if session is not None and session.death is not None else None
                engine = await self._engines.available(other_than=found_dead)
                self._session = session = EngineSession(engine, self.engine_shares, self._answered, self._dropped)
                await self._serve(session)
                await asyncio.sleep(REPLACED_WAIT_S if session.death is None else 0)
        finally:
            for job in self._jobs.values():
                job.accepts_results = False
            for fill in self._fills.values():
                fill.cancel()
            if session is not None:
                await session.close()

    async def _serve(self, session: EngineSession) -> None:
        """Use one engine until it dies, or until it is replaced and has nothing in flight."""
        group: SuspectGroup | None = None
        while session.death is None:
            if self._engines.current() is not session.engine and not session.num_in_flight:
                return
            group = self._suspects.first()
            if group is None:
                await self._start_lines(session)
            elif session.num_in_flight:
                group = None
                await self._next_change()
            else:
                await self._run_group(session, group)
        self._counters.engine_deaths += 1
        await self._after_death(session.death, group, await session.take_suspects())

    async def _start_lines(self, session: EngineSession) -> None:
        """Start some lines of the job whose turn it is, or wait for a change."""
        self._wake.clear()
        self._read_ahead()
        turn = self._next_turn() if self._may_start(session) else None
        if turn is None:
            await self._wake.wait()
            return
        job, num_started = self._jobs[turn.share.order], 0
        while num_started < turn.most_lines and job.input_reader.num_ready and self._may_start(session):
            self._start(session, job, job.input_reader.take())
            num_started += 1
        charge(turn, num_started, self._clock())
        await asyncio.sleep(0)

    def _may_start(self, session: EngineSession) -> bool:
        num_engines = self._num_engines()
        return (
            self.num_in_flight < num_engines * self._settings.max_in_flight
            and self.in_flight_bytes < num_engines * self._settings.max_in_flight_bytes
            and self._guard.state.ok
            and session.death is None
            and self._engines.current() is session.engine
        )

    def _next_turn(self) -> Turn | None:
        ready = [job for job in self._jobs.values() if job.input_reader.num_ready]
        for job in ready:
            job.share.num_left = job.num_to_start
        self._note_time()
        return next_turn((job.share for job in ready), self._clock(), self._pace.pace(self.num_in_flight))

    def _note_time(self) -> None:
        self._pace.note_time(self._clock(), was_busy=self.num_in_flight > 0)

    def _read_ahead(self) -> None:
        for job in self._jobs.values():
            if job not in self._fills and job.input_reader.wants_filling(len(self._jobs)):
                fill = partial(job.input_reader.fill, len(self._jobs))
                self._fills[job] = asyncio.ensure_future(self._guard.persist(fill))
                self._fills[job].add_done_callback(partial(self._filled, job))

    def _filled(self, job: ActiveJob, task: asyncio.Task[None]) -> None:
        del self._fills[job]
        self._wake.set()
        if not task.cancelled():
            task.result()

    async def _next_change(self) -> None:
        self._wake.clear()
        await self._wake.wait()

    def _start(self, session: EngineSession, job: ActiveJob, line: Line) -> None:
        self._note_time()
        self.num_in_flight += 1
        job.num_in_flight += 1
        if isinstance(line, RefusedLine):
            release = partial(self._release, job, 0)
            self._committer.submit(
                FinishedLine(job=job, index=line.index, encode=refused(job.id, line), on_committed=release)
            )
            return
        self.in_flight_bytes += line.num_bytes
        session.start(self._in_flight(job, line))

    def _in_flight(self, job: ActiveJob, line: RequestLine) -> LineInFlight:
        return LineInFlight(job=job, line=line, partial_output=self.partial_outputs.of((job.row.seq, line.index)))

    def _answered(self, one: LineInFlight, response: LineResponse) -> None:
        self._pace.line_answered()
        committed = partial(self._committed, one, response.request_id)
        self.partial_outputs.forget((one.job.row.seq, one.line.index))
        encode = answered(one.job.id, one.line, response)
        self._committer.submit(FinishedLine(job=one.job, index=one.line.index, encode=encode, on_committed=committed))
        self._wake.set()

    def _committed(self, one: LineInFlight, request_id: str) -> None:
        self._release(one.job, one.line.num_bytes)
        if self._session is not None:
            self._session.engine.acknowledge([request_id])

    def _dropped(self, one: LineInFlight) -> None:
        self._release(one.job, one.line.num_bytes)

    def _release(self, job: ActiveJob, num_bytes: int) -> None:
        self._note_time()
        self.num_in_flight -= 1
        self.in_flight_bytes -= num_bytes
        job.num_in_flight -= 1
        self._wake.set()

    async def _run_group(self, session: EngineSession, group: SuspectGroup) -> None:
        """Run a group of suspects with no other lines. Return when all are committed, or the engine is dead."""
        if self._deaths_alone[group.number]:
            # The partial output itself may have killed the engine: the last try begins without it.
            self.partial_outputs.forget(group.lines[0])
        for one in await self._lines_of(group):
            self._counters.lines_rerun += 1
            self._counters.lines_resumed += len(one.partial_output) > 0
            self._counters.tokens_resumed += len(one.partial_output)
            self._start(session, one.job, one.line)
        while session.num_in_flight and session.death is None:
            await self._next_change()
        if session.death is None:
            await self._committer.flush()
            self._suspects.remove(group)

    async def _lines_of(self, group: SuspectGroup) -> list[LineInFlight]:
        found: list[LineInFlight] = []
        for seq in sorted({seq for seq, _ in group.lines} & set(self._jobs)):
            job = self._jobs[seq]
            indexes = [index for key, index in group.lines if key == seq and not job.lines.is_done(index)]
            lines = await self._guard.persist(partial(job.input_reader.read, indexes))
            if job.accepts_results:
                found += [self._in_flight(job, line) for line in lines if not isinstance(line, RefusedLine)]
        return [one for one in found if one.job.accepts_results]

    async def _after_death(self, death: EngineError, group: SuspectGroup | None, suspects: list[LineInFlight]) -> None:
        if group is not None and len(group.lines) == 1:
            if not self._is_guilty(death, group):
                return  # it runs alone once more
            for one in suspects:
                self._crashed(one)
            await self._committer.flush()
            self._suspects.remove(group)
        elif group is not None or suspects:
            await self._suspects.split(group, sorted((one.job.row.seq, one.line.index) for one in suspects))

    def _is_guilty(self, death: EngineError, group: SuspectGroup) -> bool:
        """Return whether a line that ran alone is to blame for this death.

        It is to blame for the second engine: the first may have been killed from outside. It is never to blame for a
        death with a known reason (a full disk, say).
        """
        if death.code is None:
            self._deaths_alone[group.number] += 1
        return self._deaths_alone[group.number] >= DEATHS_ALONE

    def _crashed(self, one: LineInFlight) -> None:
        self.num_in_flight += 1
        self.in_flight_bytes += one.line.num_bytes
        one.job.num_in_flight += 1
        self._answered(one, engine_crashed_response(result_token(one.job.id, one.line.index)))
