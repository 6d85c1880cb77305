"""Owns the batch service as the API sees it: files, batches and their state. The package says how it works.

Every method raises RequestError (code, message, param, status_code) where the caller is wrong (400, 404, 409, 413), the
service is not open (503), or the disk does not take a write (507). It raises nothing else on purpose.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import TypeVar

from sgl_batch.errors import RequestError
from sgl_batch.jobs.batch_service.active_job import ActiveJob
from sgl_batch.jobs.batch_service.batch_creation import CreatedJob, conflict, creation, not_found
from sgl_batch.jobs.batch_service.batch_view import batch_object
from sgl_batch.jobs.batch_service.committer import Committer
from sgl_batch.jobs.batch_service.counters import ServiceCounters
from sgl_batch.jobs.batch_service.dispatcher import Dispatcher
from sgl_batch.jobs.batch_service.file_service import FileService, check_limit
from sgl_batch.jobs.batch_service.lifecycle import ENDED, JobStatus, TransitionError, check_transition
from sgl_batch.jobs.batch_service.lifecycle_driver import DriverParts, LifecycleDriver
from sgl_batch.jobs.batch_service.objects import (
    BatchObject,
    BatchPage,
    FileContent,
    FileObject,
    FilePage,
    ServiceSnapshot,
    StorageState,
)
from sgl_batch.jobs.batch_service.retention import recover, remove_expired
from sgl_batch.jobs.batch_service.settings import ServiceSettings
from sgl_batch.jobs.batch_service.storage_guard import FIRST_RETRY_S, StorageGuard
from sgl_batch.jobs.batch_service.suspect_queue import SuspectQueue
from sgl_batch.jobs.batch_service.uploads import FileUpload, storage_refusal
from sgl_batch.jobs.batch_service.window_judgement import PlannedWork, planned_work
from sgl_batch.jobs.failpoints import failpoint
from sgl_batch.jobs.job_store.directory import JobsDirectory
from sgl_batch.jobs.job_store.ids import is_batch_id
from sgl_batch.jobs.job_store.job_rows import JobRow, count_by_status, get_job, known_job, list_jobs, update_job
from sgl_batch.jobs.job_store.store import JobStore
from sgl_batch.jobs.line_engine import EngineSource
from sgl_batch.jobs.scratch import StorageError

logger = logging.getLogger(__name__)

T = TypeVar("T")

MAX_BATCHES_LISTED = 100
LONG_READS_AT_ONCE = 2
FLUSH_WAIT_S = 10.0
RETENTION_EVERY_S = 60.0


class BatchService:
    """Files and jobs in one directory, run with the engines of `engines`.

    All methods are called on one event loop, between `start` and `stop`; blocking work goes to threads. A caller may
    cancel any call: a step that changes a job (`create_batch`, `cancel_batch`) is finished all the same.

    Args:
        settings: The jobs directory, and limits of files, jobs and lines in flight.
        engines: Gives the engine that runs now. It outlives the service.
        clock: Unix time in seconds.
        tick_s: How often the ends of windows are looked for, in seconds.
        first_retry_s: The wait before the first repetition of a failed write, in seconds. It doubles up to 10 s.
        num_engines: How many engines share the lines now. The limits of lines in flight are for each of them.
    """

    def __init__(
        self,
        settings: ServiceSettings,
        engines: EngineSource,
        *,
        clock: Callable[[], float] = time.time,
        tick_s: float = 1.0,
        first_retry_s: float = FIRST_RETRY_S,
        num_engines: Callable[[], int] = lambda: 1,
    ) -> None:
        self._engines = engines
        self._price_per_hour = settings.price_per_hour
        self._clock = clock
        self._tick_s = tick_s
        self._store = JobStore(JobsDirectory(settings.jobs_dir))
        self._guard = StorageGuard(clock, first_retry_s)
        self._counters = ServiceCounters()
        self._committer = Committer(self._store, self._guard, self._counters)
        suspects = SuspectQueue(self._store, self._guard)
        self._dispatcher = Dispatcher(
            settings, engines, self._committer, suspects, self._guard, self._counters, clock, num_engines
        )
        self._parts = DriverParts(
            settings=settings,
            store=self._store,
            guard=self._guard,
            engines=engines,
            committer=self._committer,
            suspects=suspects,
            dispatcher=self._dispatcher,
            clock=clock,
            long_reads=asyncio.Semaphore(LONG_READS_AT_ONCE),
        )
        self._jobs: dict[str, ActiveJob] = {}
        self._files = FileService(self._store, settings.max_file_bytes, clock, self._jobs.get)
        self._ended: Counter[str] = Counter()
        self._loops: list[asyncio.Task[None]] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._fault: str | None = None
        self._is_open = False

    async def start(self) -> None:
        """Open the jobs directory, recover the jobs of an earlier server, and begin to run them.

        It returns without waiting for an engine. It is called once; `stop` undoes it.

        Raises:
            ConfigError: Another server holds the directory, or its database is newer than this program.
            StorageError: The directory cannot be read or written. Then nothing runs, and the directory is free.
        """
        await asyncio.to_thread(self._store.open)
        try:
            running, ended = await recover(self._store)
            counts = await self._store.read(count_by_status)
        except BaseException:
            await asyncio.to_thread(self._store.close)
            raise
        self._ended.update({status: number for status, number in counts.items() if status in ENDED})
        self._loops = [
            self._watched(work) for work in (self._committer.run(), self._dispatcher.run(), self._check_times())
        ]
        for row in running:
            self._begin(ActiveJob(row, self._clock))
        for row in ended:
            self._keep(LifecycleDriver(ActiveJob(row, self._clock), self._parts).tidy())
        self._is_open = True

    async def stop(self) -> None:
        """Give up the lines in flight, commit the finished ones, and let go of the directory. Idempotent.

        All methods of files and jobs raise 503 from now on. Jobs that have not ended go on at the next `start`. Where
        the disk does not take the last commit within 10 s, the lines of that commit run again then.
        """
        if not self._is_open:
            return
        self._is_open = False
        committing, *others = self._loops
        await _cancelled(others)
        with suppress(TimeoutError):
            await asyncio.wait_for(self._committer.flush(), FLUSH_WAIT_S)
            with suppress(StorageError):
                await asyncio.wait_for(self._keep_engine_times(), FLUSH_WAIT_S)
        await _cancelled([*self._tasks, committing])
        with suppress(StorageError):
            await self._committer.close()
        await asyncio.to_thread(self._store.close)

    async def begin_upload(self) -> FileUpload:
        """Begin a file of unknown length.

        The caller enters the upload (`async with await service.begin_upload() as upload`), awaits `upload.write` for
        each piece, and then `upload.finish`, which returns the FileObject. From then on the file is durable. Leaving
        the block without `finish` removes what was written.
        """
        self._check_open()
        return self._files.begin_upload()

    async def list_files(
        self, *, purpose: str | None = None, limit: int = 10_000, order: str = "desc", after: str | None = None
    ) -> FilePage:
        """Return one page of files, without outputs of running jobs.

        Args:
            purpose: "batch", "batch_output", or None for both.
            limit: The most files in the page, 1 to 10,000.
            order: "asc" or "desc", by creation.
            after: The id of the last file of the page before.
        """
        with self._refusals():
            return await self._files.list_files(purpose=purpose, limit=limit, order=order, after=after)

    async def get_file(self, file_id: str) -> FileObject:
        """Return one file. The output of a running job has the status `uploaded`, and the size that can be read now."""
        with self._refusals():
            return await self._files.get(file_id)

    async def delete_file(self, file_id: str) -> None:
        """Delete a file. Raises 409 (file_in_use) while a job that has not ended needs it.

        A reader that has opened its content reads on to the end.
        """
        with self._refusals():
            await self._files.delete(file_id)

    async def open_content(self, file_id: str) -> FileContent:
        """Open the bytes of a file; of a running job's output, the lines before the first unfinished one.

        The size is fixed when this returns. The caller iterates `chunks` to the end, or closes it.
        """
        with self._refusals():
            return await self._files.open_content(file_id)

    async def create_batch(self, body: Mapping[str, object], *, idempotency_key: str | None = None) -> BatchObject:
        """Make a job from the body of POST /v1/batches. It is durable when this returns, and validated afterwards.

        Args:
            body: OpenAI's fields, or `continue_from`: the id of an ended job whose answered lines are reused.
            idempotency_key: The same key with the same body returns the same job. With another body it raises 409
                (idempotency_key_reused).
        """
        create = creation(body, idempotency_key, int(self._clock()))
        with self._refusals():
            return await self._finished(self._create(create))

    async def get_batch(self, batch_id: str) -> BatchObject:
        """Return one job as it is now. Jobs are never deleted."""
        with self._refusals():
            row = await self._store.read(lambda db: get_job(db, batch_id)) if is_batch_id(batch_id) else None
        if row is None:
            not_found("batch", batch_id)
        return self._shown(row, self._planned())

    async def list_batches(self, *, limit: int = 20, after: str | None = None) -> BatchPage:
        """Return one page of jobs, newest first: up to `limit` (1 to 100) of those created before the job `after`."""
        check_limit(limit, MAX_BATCHES_LISTED)
        if after is not None:
            await self.get_batch(after)
        with self._refusals():
            rows = await self._store.read(lambda db: list_jobs(db, limit=limit + 1, after=after))
        planned = self._planned()
        return BatchPage(data=tuple(self._shown(row, planned) for row in rows[:limit]), has_more=len(rows) > limit)

    async def cancel_batch(self, batch_id: str) -> BatchObject:
        """Begin to cancel a job. Idempotent while it is `cancelling`.

        Raises 409 (batch_not_cancellable) for a job that is `finalizing` or has ended. The job is `cancelling` until
        its files are written. Lines that are finished keep their results.
        """
        await self.get_batch(batch_id)
        with self._refusals():
            return await self._finished(self._cancel(batch_id))

    def snapshot(self) -> ServiceSnapshot:
        """Return the state of the service at this moment. It waits for nothing and raises nothing."""
        planned = self._planned()
        by_status = self._ended + Counter(str(job.row.status) for job in self._jobs.values())
        idle_s = min((job.tracker.snapshot().idle_s for job in self._jobs.values() if job.runs), default=None)
        return ServiceSnapshot(
            jobs=tuple(self._shown(job.row, planned) for job in self._jobs.values()),
            jobs_by_status=dict(by_status),
            in_flight=self._dispatcher.num_in_flight,
            in_flight_bytes=self._dispatcher.in_flight_bytes,
            partial_output_tokens=self._dispatcher.partial_outputs.num_tokens,
            engine_ready=self._engines.current() is not None,
            storage=self.storage,
            finished_s_ago=idle_s,
            fault=self._fault,
            counters={
                **self._counters.as_dict(),
                "storage_failures": float(self._guard.num_failures),
                "engine_s": self._dispatcher.engine_shares.busy_s(),
            },
            price_per_hour=self._price_per_hour,
        )

    @property
    def storage(self) -> StorageState:
        """Whether the jobs directory takes writes."""
        return self._guard.state

    async def _create(self, create: Callable[[sqlite3.Connection], CreatedJob]) -> BatchObject:
        created = await self._store.write(create)
        if created.is_new:
            failpoint("creation.committed")
            self._counters.jobs_created += 1
        # A job found by its key may come from a request that got 507, although its transaction was committed.
        if created.row.status not in ENDED and created.row.id not in self._jobs:
            self._begin(ActiveJob(created.row, self._clock))
        return self._shown(created.row, self._planned())

    async def _cancel(self, batch_id: str) -> BatchObject:
        now = int(self._clock())

        def cancel(db: sqlite3.Connection) -> JobRow:
            row = known_job(db, batch_id)
            if row.status != JobStatus.CANCELLING:
                check_transition(JobStatus(row.status), JobStatus.CANCELLING)
                update_job(db, batch_id, {"status": str(JobStatus.CANCELLING), "cancelling_at": now})
            return known_job(db, batch_id)

        try:
            row = await self._store.write(cancel)
        except TransitionError as error:
            conflict("batch_not_cancellable", f"job {batch_id} is {error.status} and cannot be cancelled any more")
        failpoint("service.cancelling")
        job = self._jobs.get(batch_id)
        if job is not None:
            job.changed(status=row.status, cancelling_at=row.cancelling_at)
            job.over.set()
        return self._shown(row, self._planned())

    async def _keep_engine_times(self) -> None:
        """Write what jobs had of the engine since their last commits."""
        times = [(job.id, job.engine_share.seconds) for job in self._jobs.values()]

        def keep(db: sqlite3.Connection) -> None:
            for job_id, engine_s in times:
                update_job(db, job_id, {"engine_s": engine_s})

        await self._store.write(keep)

    def _begin(self, job: ActiveJob) -> None:
        self._jobs[job.id] = job
        self._keep(self._drive(job))

    async def _drive(self, job: ActiveJob) -> None:
        driver = LifecycleDriver(job, self._parts)
        await driver.drive()
        del self._jobs[job.id]
        self._ended[job.row.status] += 1
        self._counters.jobs_ended += 1
        await driver.tidy()

    async def _check_times(self) -> None:
        """End jobs whose window is over, and delete expired files."""
        files_checked_at = self._clock()
        while True:
            await asyncio.sleep(self._tick_s)
            now = self._clock()
            for job in self._jobs.values():
                if job.row.expires_at <= now and job.status in (JobStatus.VALIDATING, JobStatus.IN_PROGRESS):
                    job.over.set()
            if now - files_checked_at >= RETENTION_EVERY_S:
                files_checked_at = now
                try:
                    await remove_expired(self._store, now)
                except StorageError as error:
                    logger.error("expired files are kept for now: %s", error)

    def _planned(self) -> PlannedWork | None:
        return planned_work(self._engines.current(), self._jobs.values())

    def _shown(self, row: JobRow, planned: PlannedWork | None) -> BatchObject:
        active = self._jobs.get(row.id)
        if active is not None:
            self._dispatcher.engine_shares.settle(active.engine_share)
        return batch_object(
            row,
            active,
            now=self._clock(),
            engine_ready=self._engines.current() is not None,
            storage=self.storage,
            planned=planned,
            price_per_hour=self._price_per_hour,
        )

    def _keep(self, work: Coroutine[None, None, None]) -> None:
        task = self._watched(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _watched(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        """Return a task whose exception, which can only be a fault of the program, is logged and shown in /health."""
        task = asyncio.ensure_future(work)
        task.add_done_callback(self._ended_task)
        return task

    def _ended_task(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fault = f"{type(error).__name__}: {error}"
            logger.critical("a fault of the program stopped a part of the batch service", exc_info=error)

    async def _finished(self, work: Coroutine[None, None, T]) -> T:
        """Return the result of a step that is finished even where its caller is cancelled."""
        return await asyncio.shield(asyncio.ensure_future(work))

    def _check_open(self) -> None:
        if not self._is_open:
            raise RequestError(
                code="service_unavailable", message="the server is starting or ending; try again", status_code=503
            )

    @contextmanager
    def _refusals(self) -> Iterator[None]:
        self._check_open()
        try:
            yield
        except StorageError as error:
            raise storage_refusal(error) from error


async def _cancelled(tasks: Sequence[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks)
