"""The service as the API layer sees it: files, batches, state. It does not decide how HTTP shows any of it.

Every method raises RequestError (code, message, param, status_code: 400, 404, 409, 413, 503, 507) for what the caller
got wrong or the disk cannot take, and nothing else on purpose.
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
    """Files and jobs in one directory, run with the engines of `engines`. Everything runs on one event loop."""

    def __init__(
        self,
        settings: ServiceSettings,
        engines: EngineSource,
        *,
        clock: Callable[[], float] = time.time,
        tick_s: float = 1.0,
        first_retry_s: float = FIRST_RETRY_S,
    ) -> None:
        self._engines = engines
        self._clock = clock
        self._tick_s = tick_s
        self._store = JobStore(JobsDirectory(settings.jobs_dir))
        self._guard = StorageGuard(clock, first_retry_s)
        self._counters = ServiceCounters()
        self._committer = Committer(self._store, self._guard, self._counters)
        suspects = SuspectQueue(self._store, self._guard)
        self._dispatcher = Dispatcher(settings, engines, self._committer, suspects, self._guard, self._counters, clock)
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
        """Open the directory, recover what was running, begin to run jobs.

        Raises ConfigError where another server holds the directory or its database is newer than this program, and
        StorageError where the directory cannot be read or written.
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
            self._watched(work) for work in (self._committer.run(), self._dispatcher.run(), self._look_at_the_clock())
        ]
        for row in running:
            self._begin(ActiveJob(row, self._clock))
        for row in ended:
            self._keep(LifecycleDriver(ActiveJob(row, self._clock), self._parts).tidy())
        self._is_open = True

    async def stop(self) -> None:
        """Admit nothing more, give up lines in flight, commit what is finished, let go of the directory."""
        if not self._is_open:
            return
        self._is_open = False
        committing, *others = self._loops
        await _cancelled(others)
        with suppress(TimeoutError):
            await asyncio.wait_for(self._committer.flush(), FLUSH_WAIT_S)
        await _cancelled([*self._tasks, committing])
        with suppress(StorageError):
            await self._committer.close()
        await asyncio.to_thread(self._store.close)

    async def begin_upload(self) -> FileUpload:
        """A file of unknown length: `async with await service.begin_upload() as upload`, then write and finish."""
        self._check_open()
        return self._files.begin_upload()

    async def list_files(
        self, *, purpose: str | None = None, limit: int = 10_000, order: str = "desc", after: str | None = None
    ) -> FilePage:
        """Files by creation, `order` asc or desc."""
        with self._refusals():
            return await self._files.list_files(purpose=purpose, limit=limit, order=order, after=after)

    async def get_file(self, file_id: str) -> FileObject:
        """One file, or the output of a running job."""
        with self._refusals():
            return await self._files.get(file_id)

    async def delete_file(self, file_id: str) -> None:
        """Delete a file; 409 (file_in_use) while a job that has not ended needs it."""
        with self._refusals():
            await self._files.delete(file_id)

    async def open_content(self, file_id: str) -> FileContent:
        """A file's bytes; of a running job's output, the lines before the first that is not finished."""
        with self._refusals():
            return await self._files.open_content(file_id)

    async def create_batch(self, body: Mapping[str, object], *, idempotency_key: str | None = None) -> BatchObject:
        """Check the request body of POST /v1/batches (and its `continue_from`) and queue the job for validation.

        The same key with the same body gives the same job; with another body, 409 (idempotency_key_reused).
        """
        create = creation(body, idempotency_key, int(self._clock()))
        with self._refusals():
            return await self._finished(self._create(create))

    async def get_batch(self, batch_id: str) -> BatchObject:
        """One job as it is now."""
        with self._refusals():
            row = await self._store.read(lambda db: get_job(db, batch_id)) if is_batch_id(batch_id) else None
        if row is None:
            not_found("batch", batch_id)
        return self._shown(row)

    async def list_batches(self, *, limit: int = 20, after: str | None = None) -> BatchPage:
        """Jobs, newest first."""
        check_limit(limit, MAX_BATCHES_LISTED)
        if after is not None:
            await self.get_batch(after)
        with self._refusals():
            rows = await self._store.read(lambda db: list_jobs(db, limit=limit + 1, after=after))
        return BatchPage(data=tuple(self._shown(row) for row in rows[:limit]), has_more=len(rows) > limit)

    async def cancel_batch(self, batch_id: str) -> BatchObject:
        """Begin to cancel; a job that has ended raises 409 (batch_not_cancellable); it may be asked for twice."""
        await self.get_batch(batch_id)
        with self._refusals():
            return await self._finished(self._cancel(batch_id))

    def snapshot(self) -> ServiceSnapshot:
        """The service at this moment."""
        by_status = self._ended + Counter(str(job.row.status) for job in self._jobs.values())
        idle_s = min((job.tracker.snapshot().idle_s for job in self._jobs.values() if job.runs), default=None)
        return ServiceSnapshot(
            jobs=tuple(self._shown(job.row) for job in self._jobs.values()),
            jobs_by_status=dict(by_status),
            in_flight=self._dispatcher.num_in_flight,
            in_flight_bytes=self._dispatcher.in_flight_bytes,
            partial_output_tokens=self._dispatcher.partial_outputs.num_tokens,
            engine_ready=self._engines.current() is not None,
            storage=self.storage,
            finished_s_ago=idle_s,
            fault=self._fault,
            counters={**self._counters.as_dict(), "storage_failures": float(self._guard.num_failures)},
        )

    @property
    def storage(self) -> StorageState:
        """Whether the directory takes writes."""
        return self._guard.state

    async def _create(self, create: Callable[[sqlite3.Connection], CreatedJob]) -> BatchObject:
        created = await self._store.write(create)
        if created.is_new:
            failpoint("creation.committed")
            self._counters.jobs_created += 1
        # A job found by its key may have been written by a request that was told the disk had failed.
        if created.row.status not in ENDED and created.row.id not in self._jobs:
            self._begin(ActiveJob(created.row, self._clock))
        return self._shown(created.row)

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
        return self._shown(row)

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

    async def _look_at_the_clock(self) -> None:
        """Endpoints jobs whose window is over, and deletes files whose time is over."""
        looked_at_files = self._clock()
        while True:
            await asyncio.sleep(self._tick_s)
            now = self._clock()
            for job in self._jobs.values():
                if job.row.expires_at <= now and job.status in (JobStatus.VALIDATING, JobStatus.IN_PROGRESS):
                    job.over.set()
            if now - looked_at_files >= RETENTION_EVERY_S:
                looked_at_files = now
                try:
                    await remove_expired(self._store, now)
                except StorageError as error:
                    logger.error("expired files are kept for now: %s", error)

    def _shown(self, row: JobRow) -> BatchObject:
        return batch_object(
            row,
            self._jobs.get(row.id),
            now=self._clock(),
            engine_ready=self._engines.current() is not None,
            storage=self.storage,
        )

    def _keep(self, work: Coroutine[None, None, None]) -> None:
        task = self._watched(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _watched(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        """A task whose fault, which can only be the program's, is said instead of lost."""
        task = asyncio.ensure_future(work)
        task.add_done_callback(self._ended_task)
        return task

    def _ended_task(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fault = f"{type(error).__name__}: {error}"
            logger.critical("a fault of the program stopped a part of the batch service", exc_info=error)

    async def _finished(self, work: Coroutine[None, None, T]) -> T:
        """The result of a step that is done whole even where its caller goes away."""
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
