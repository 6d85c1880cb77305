"""Takes one job from its status to its end: validation, running, writing its files, tidying up.

It does not decide which moves are allowed (lifecycle), nor which line runs when (dispatcher).
"""

from __future__ import annotations

import asyncio
import json
import sqlite3
import threading
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from itertools import islice
from typing import TypeVar

from sgl_batch.jobs.batch_service.active_job import ActiveJob
from sgl_batch.jobs.batch_service.batch_view import output_name
from sgl_batch.jobs.batch_service.committer import Committer
from sgl_batch.jobs.batch_service.dispatcher import Dispatcher
from sgl_batch.jobs.batch_service.finalizer import Finalizer, OutputSizes, Unanswered
from sgl_batch.jobs.batch_service.finished_line import FinishedLine
from sgl_batch.jobs.batch_service.input_reader import InputReader
from sgl_batch.jobs.batch_service.lifecycle import ENDED, JobStatus, TransitionError, check_transition, time_column
from sgl_batch.jobs.batch_service.line_offsets import LineOffsets
from sgl_batch.jobs.batch_service.line_states import LineStates
from sgl_batch.jobs.batch_service.reuse_results import ReusedLine, successes
from sgl_batch.jobs.batch_service.settings import ServiceSettings
from sgl_batch.jobs.batch_service.storage_guard import StorageGuard
from sgl_batch.jobs.batch_service.suspect_queue import SuspectQueue
from sgl_batch.jobs.batch_service.validation import ValidatedInput, ValidationRules, validate_input
from sgl_batch.jobs.failpoints import failpoint
from sgl_batch.jobs.job_store.file_rows import FileRow, insert_file
from sgl_batch.jobs.job_store.job_rows import known_job, line_offsets, update_job
from sgl_batch.jobs.job_store.result_rows import (
    LineKey,
    clear_suspects_of_job,
    delete_some_results,
    finished_lines,
    suspects_of_job,
)
from sgl_batch.jobs.job_store.segment import cut
from sgl_batch.jobs.job_store.store import JobStore
from sgl_batch.jobs.line_engine import EngineSource
from sgl_batch.jobs.request_line import LineRules
from sgl_batch.jobs.scratch import storage_errors

T = TypeVar("T")

REUSE_AT_ONCE = 500  # lines
DELETE_ROWS_AT_ONCE = 10_000
_UNANSWERED = {
    JobStatus.EXPIRED: Unanswered(
        code="batch_expired", message="the job's completion window ended before this line was finished"
    ),
    JobStatus.CANCELLED: Unanswered(
        code="batch_cancelled", message="the job was cancelled before this line was finished"
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class DriverParts:
    """The parts of the service that every driver uses."""

    settings: ServiceSettings
    store: JobStore
    guard: StorageGuard
    engines: EngineSource
    committer: Committer
    suspects: SuspectQueue
    dispatcher: Dispatcher
    clock: Callable[[], float]
    long_reads: asyncio.Semaphore  # limits how many jobs read or write whole files at once: threads are few


class LifecycleDriver:
    """Drives one job, from any status: also a job of an earlier server. Cancelling `drive` leaves the job as it is."""

    def __init__(self, job: ActiveJob, parts: DriverParts) -> None:
        self._job = job
        self._parts = parts
        self._stop = threading.Event()

    async def drive(self) -> None:
        """Take the job to its end."""
        try:
            if self._job.status is JobStatus.VALIDATING:
                await self._unless_over(self._validate())
            if self._job.status is JobStatus.IN_PROGRESS:
                await self._unless_over(self._begin())
                await self._job.over.wait()
            if self._job.status not in ENDED:
                await self._finish()
        finally:
            self._stop.set()

    async def tidy(self) -> None:
        """Remove the segment and the result rows of an ended job. After a crash the next start goes on with it."""
        job, store = self._job, self._parts.store
        more = True
        while more:
            more = await self._persist(lambda db: delete_some_results(db, job.row.seq, DELETE_ROWS_AT_ONCE))
            failpoint("driver.some_results_deleted")
        await self._parts.guard.persist(lambda: self._parts.committer.close_segment(job))
        await asyncio.to_thread(store.directory.segment(job.id).unlink, missing_ok=True)
        failpoint("driver.segment_removed")
        await self._persist(lambda db: update_job(db, job.id, {"is_tidy": 1}))

    async def _unless_over(self, step: Coroutine[None, None, None]) -> None:
        """Run a step, and give it up as soon as the job is over (cancelled, expired)."""
        work, over = asyncio.ensure_future(step), asyncio.ensure_future(self._job.over.wait())
        try:
            await asyncio.wait({work, over}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            over.cancel()
            if not work.done():
                self._stop.set()
                work.cancel()
                await asyncio.wait({work})
                self._stop = threading.Event()
        # A request may cancel the job just before the step moves it. Then the job is over, and `drive` goes on.
        with suppress(TransitionError, asyncio.CancelledError):
            work.result()

    async def _validate(self) -> None:
        parts, row = self._parts, self._job.row
        engine = await parts.engines.available()
        rules = ValidationRules(
            endpoint=row.endpoint,
            served_model_names=engine.served_model_names,
            max_lines=parts.settings.max_job_lines,
            max_line_bytes=parts.settings.max_line_bytes,
        )
        path = parts.store.directory.file(row.input_file_id)
        new_scratch = parts.store.directory.new_scratch
        async with parts.long_reads:
            found = await parts.guard.persist(
                lambda: asyncio.to_thread(validate_input, path, new_scratch(), rules, self._stop)
            )
        failpoint("driver.validated")
        if found.faults:
            await self._move(JobStatus.FAILED, errors=_errors(found))
        else:
            await self._move(
                JobStatus.IN_PROGRESS,
                total=found.total,
                model=found.model,
                line_offsets=found.offsets,
                estimated_prompt_tokens=int(found.load.prompt_tokens),
                estimated_output_tokens=int(found.load.output_tokens),
                longest_output=found.load.longest_output,
            )
        failpoint("driver.validation_written")

    async def _begin(self) -> None:
        """Load which lines are committed, and let the others run."""
        parts, job = self._parts, self._job
        offsets, suspects = await parts.guard.persist(self._load)
        if not job.row.taken_over:
            await self._reuse_results()
        engine = await parts.engines.available()
        for _, (_, index) in suspects:
            job.lines.take(index)
        rules = LineRules(
            served_model_names=engine.served_model_names,
            job_seed=job.row.seed,
            max_line_bytes=parts.settings.max_line_bytes,
        )
        path = parts.store.directory.file(job.row.input_file_id)
        job.begin(InputReader(path, offsets, rules, job.lines))
        parts.suspects.restore(suspects)
        parts.dispatcher.add(job)

    async def _load(self) -> tuple[LineOffsets, list[tuple[int, LineKey]]]:
        job, path = self._job, self._parts.store.directory.segment(self._job.id)
        with storage_errors(f"recovering {path}"):
            cut(path, job.row.segment_bytes)

        def read(db: sqlite3.Connection) -> tuple[LineOffsets, LineStates, list[tuple[int, LineKey]]]:
            lines = LineStates(job.row.total, finished_lines(db, job.row.seq))
            return LineOffsets(line_offsets(db, job.id)), lines, suspects_of_job(db, job.row.seq)

        offsets, job.lines, suspects = await self._parts.store.read(read)
        return offsets, suspects

    async def _reuse_results(self) -> None:
        """Copy the answered lines of the job that this one continues, except those copied before a crash."""
        parts, job = self._parts, self._job
        assert job.row.continue_from is not None, "only a job that continues another has results to reuse"
        earlier = await self._persist(partial(known_job, job_id=job.row.continue_from))
        if earlier.has_output:
            directory = parts.store.directory
            lines = successes(
                directory.file(earlier.output_file_id),
                directory.file(job.row.input_file_id),
                parts.settings.max_line_bytes,
            )
            while some := await asyncio.to_thread(lambda: list(islice(lines, REUSE_AT_ONCE))):
                for one in some:
                    self._reuse(one)
                await parts.committer.flush()
                failpoint("driver.some_reused")
        await self._persist(lambda db: update_job(db, job.id, {"taken_over": 1}))
        job.changed(taken_over=1)

    def _reuse(self, one: ReusedLine) -> None:
        if self._job.lines.is_to_do(one.index):
            self._job.lines.take(one.index)
            self._parts.committer.submit(
                FinishedLine(job=self._job, index=one.index, encode=lambda: one.result_line, on_committed=lambda: None)
            )

    async def _finish(self) -> None:
        parts, job = self._parts, self._job
        await parts.dispatcher.withdraw(job)
        # The transaction of a step that was given up may have been committed.
        job.row = await self._persist(partial(known_job, job_id=job.id))
        ending = await self._settle_ending()
        if not job.row.total:  # it was not validated: there are no lines to write
            await self._move(ending)
            return
        finalizer = Finalizer(parts.store.directory, job.row, _UNANSWERED.get(ending), self._stop)
        async with parts.long_reads:
            sizes = await parts.guard.persist(lambda: asyncio.to_thread(finalizer.run, parts.settings.max_line_bytes))
        files = self._output_rows(sizes)

        def add_files(db: sqlite3.Connection) -> None:
            for file in files:
                insert_file(db, file)
            clear_suspects_of_job(db, job.row.seq)

        has = {"has_output": int(sizes.output > 0), "has_errors": int(sizes.errors > 0)}
        await self._move(ending, add_files, **has, engine_s=job.engine_share.seconds)
        failpoint("driver.ended")

    async def _settle_ending(self) -> JobStatus:
        """Settle how the job ends. A request to cancel it counts until the job is `finalizing`."""
        job = self._job
        if job.status is JobStatus.CANCELLING:
            return JobStatus.CANCELLED
        try:
            if job.status is JobStatus.VALIDATING:
                await self._move(JobStatus.EXPIRED)
                return JobStatus.EXPIRED
            if job.status is not JobStatus.FINALIZING:
                await self._move(JobStatus.FINALIZING)
                failpoint("driver.finalizing")
        except TransitionError:
            return JobStatus.CANCELLED
        is_whole = job.totals.completed + job.totals.failed == job.row.total
        return JobStatus.COMPLETED if is_whole else JobStatus.EXPIRED

    def _output_rows(self, sizes: OutputSizes) -> list[FileRow]:
        job, now = self._job.row, int(self._parts.clock())
        expires_at = None if job.output_expires_after is None else now + job.output_expires_after
        return [
            FileRow(
                id=file_id,
                num_bytes=num_bytes,
                created_at=now,
                filename=output_name(job, file_id),
                purpose="batch_output",
                expires_at=expires_at,
            )
            for file_id, num_bytes in ((job.output_file_id, sizes.output), (job.error_file_id, sizes.errors))
            if num_bytes
        ]

    async def _move(
        self, to: JobStatus, also: Callable[[sqlite3.Connection], None] | None = None, **changes: object
    ) -> None:
        """Move the job to a status; `also` runs in the same transaction. Raises TransitionError."""
        changes = {"status": str(to), time_column(to): int(self._parts.clock()), **changes}

        def work(db: sqlite3.Connection) -> None:
            row = known_job(db, self._job.id)
            if row.status == to:
                return  # an earlier attempt was committed, although it raised
            check_transition(JobStatus(row.status), to)
            update_job(db, self._job.id, changes)
            if also is not None:
                also(db)

        await self._persist(work)
        self._job.changed(**changes)

    async def _persist(self, work: Callable[[sqlite3.Connection], T]) -> T:
        return await self._parts.guard.persist(lambda: self._parts.store.write(work))


def _errors(found: ValidatedInput) -> str:
    return json.dumps({"object": "list", "data": [asdict(fault) for fault in found.faults]})
