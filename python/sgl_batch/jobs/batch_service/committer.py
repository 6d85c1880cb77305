"""Owns the group commit: finished lines are appended to their segments, synced, and added to the database at once.

When the disk does not take a write, `storage_guard` repeats the commit.
"""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections import deque
from collections.abc import Sequence
from functools import partial

from sgl_batch.jobs.batch_service.active_job import ActiveJob
from sgl_batch.jobs.batch_service.counters import ServiceCounters
from sgl_batch.jobs.batch_service.finished_line import FinishedLine, ResultLine
from sgl_batch.jobs.batch_service.storage_guard import StorageGuard
from sgl_batch.jobs.failpoints import failpoint
from sgl_batch.jobs.job_store.database import transaction
from sgl_batch.jobs.job_store.result_rows import (
    JobResults,
    ResultRow,
    Totals,
    add_results,
    clear_suspects,
    finished_among,
    segment_bytes,
)
from sgl_batch.jobs.job_store.segment import Segments
from sgl_batch.jobs.job_store.store import JobStore

MAX_LINES_AT_ONCE = 1024


class Committer:
    """Commits finished lines in groups. Lines that are submitted during a commit go into the next one.

    The key of its row (job, line) makes a line count once.
    """

    def __init__(self, store: JobStore, guard: StorageGuard, counters: ServiceCounters) -> None:
        self._store = store
        self._guard = guard
        self._counters = counters
        self._segments = Segments()  # used by the writing thread alone
        self._after_failure = False  # likewise
        self._pending: deque[FinishedLine] = deque()
        self._wake = asyncio.Event()
        self._num_submitted = 0
        self._num_committed = 0
        self._flushes: list[tuple[int, asyncio.Future[None]]] = []

    def submit(self, line: FinishedLine) -> None:
        """Queue a finished line, which `run` commits."""
        self._pending.append(line)
        self._num_submitted += 1
        self._wake.set()

    async def flush(self) -> None:
        """Wait until all lines that were submitted so far are committed."""
        if self._num_committed < self._num_submitted:
            reached = asyncio.get_running_loop().create_future()
            self._flushes.append((self._num_submitted, reached))
            await reached

    async def run(self) -> None:
        """Commit until cancelled. The caller flushes before, or loses the lines that are not committed."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._pending:
                batch = [self._pending.popleft() for _ in range(min(len(self._pending), MAX_LINES_AT_ONCE))]
                await self._commit(batch)

    async def close_segment(self, job: ActiveJob) -> None:
        """Close the segment of a job for which nothing more comes."""
        path = self._store.directory.segment(job.id)
        await self._store.on_writer(lambda connection: self._segments.close(path))

    async def close(self) -> None:
        """Close all segments."""
        await self._store.on_writer(lambda connection: self._segments.close_all())

    async def _commit(self, batch: list[FinishedLine]) -> None:
        start_s = time.perf_counter()
        result_lines = await self._guard.persist(lambda: self._store.on_writer(partial(self._write, batch)))
        self._counters.commits += 1
        self._counters.commit_s += time.perf_counter() - start_s
        for line, result_line in zip(batch, result_lines, strict=True):
            self._count(result_line)
            line.job.committed(line.index, result_line.totals)
            line.on_committed()
        self._num_committed += len(batch)
        while self._flushes and self._flushes[0][0] <= self._num_committed:
            _, reached = self._flushes.pop(0)
            if not reached.done():
                reached.set_result(None)

    def _write(self, batch: Sequence[FinishedLine], connection: sqlite3.Connection) -> list[ResultLine]:
        """Append and commit a group of lines. It runs in the writing thread."""
        result_lines = [line.encode() for line in batch]
        try:
            self._write_result_lines(connection, _by_job(batch, result_lines))
        except BaseException:
            # After a failed sync, cached pages may never reach the disk: all that is not committed is written again.
            self._segments.close_all()
            self._after_failure = True
            raise
        self._after_failure = False
        return result_lines

    def _write_result_lines(
        self, connection: sqlite3.Connection, by_job: Sequence[tuple[ActiveJob, list[tuple[int, ResultLine]]]]
    ) -> None:
        added: list[JobResults] = []
        for job, lines in by_job:
            if self._after_failure:  # the failed transaction may have been committed all the same
                finished = finished_among(connection, job.row.seq, [index for index, _ in lines])
                lines = [one for one in lines if one[0] not in finished]
            committed_bytes = segment_bytes(connection, job.row.seq)
            added.append(self._append(job, committed_bytes, lines))
        with transaction(connection):
            for results in added:
                add_results(connection, results)
                clear_suspects(connection, [(results.job_seq, row.line_index) for row in results.rows])
            failpoint("committer.rows_written")
        failpoint("committer.committed")

    def _append(self, job: ActiveJob, committed_bytes: int, lines: Sequence[tuple[int, ResultLine]]) -> JobResults:
        """Append to one job's segment. Return what the database gets."""
        path = self._store.directory.segment(job.id)
        offsets = self._segments.write(path, committed_bytes, [result_line.data for _, result_line in lines])
        rows = [
            ResultRow(line_index=index, offset=offset, num_bytes=len(result_line.data), failed=result_line.failed)
            for (index, result_line), offset in zip(lines, offsets, strict=True)
        ]
        totals = sum((result_line.totals for _, result_line in lines), start=Totals())
        return JobResults(
            job_seq=job.row.seq,
            rows=rows,
            totals=totals,
            segment_bytes=committed_bytes + sum(row.num_bytes for row in rows),
            engine_s=job.engine_share.seconds,  # it was settled when the last of these lines left the engine
        )

    def _count(self, result_line: ResultLine) -> None:
        counters = self._counters
        counters.committed_bytes += len(result_line.data)
        counters.lines_completed += result_line.totals.completed
        counters.lines_failed += result_line.totals.failed
        counters.tokens_in += result_line.totals.input_tokens
        counters.tokens_out += result_line.totals.output_tokens


def _by_job(
    batch: Sequence[FinishedLine], result_lines: Sequence[ResultLine]
) -> list[tuple[ActiveJob, list[tuple[int, ResultLine]]]]:
    found: dict[str, tuple[ActiveJob, list[tuple[int, ResultLine]]]] = {}
    for line, result_line in zip(batch, result_lines, strict=True):
        found.setdefault(line.job.id, (line.job, []))[1].append((line.index, result_line))
    return list(found.values())
