"""Owns files as the API sees them, among them the outputs of running jobs."""

from __future__ import annotations

import asyncio
import sqlite3
from array import array
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import BinaryIO

from sgl_batch.jobs.batch_service.active_job import ActiveJob
from sgl_batch.jobs.batch_service.batch_creation import conflict, not_found
from sgl_batch.jobs.batch_service.batch_view import file_object, running_output
from sgl_batch.jobs.batch_service.content import segment_extents, whole_file
from sgl_batch.jobs.batch_service.objects import FileContent, FileObject, FilePage
from sgl_batch.jobs.batch_service.retention import delete_unless_needed, unlink_file
from sgl_batch.jobs.batch_service.uploads import FileUpload
from sgl_batch.jobs.body_rules import refuse, show
from sgl_batch.jobs.failpoints import failpoint
from sgl_batch.jobs.job_store.file_rows import FileRow, get_file, insert_file, list_files
from sgl_batch.jobs.job_store.ids import is_file_id, new_file_id
from sgl_batch.jobs.job_store.job_rows import job_of_file, known_job
from sgl_batch.jobs.job_store.result_rows import extents
from sgl_batch.jobs.job_store.store import JobStore
from sgl_batch.jobs.scratch import storage_errors

MAX_FILES_LISTED = 10_000


class FileService:
    """Uploads, lists, reads and deletes files. `active` returns the job of an id that has not ended, or None."""

    def __init__(
        self,
        store: JobStore,
        max_file_bytes: int,
        clock: Callable[[], float],
        active: Callable[[str], ActiveJob | None],
    ) -> None:
        self._store = store
        self._max_file_bytes = max_file_bytes
        self._clock = clock
        self._active = active

    def begin_upload(self) -> FileUpload:
        """Begin a new file."""
        return FileUpload(self._store.directory.new_partial(), self._max_file_bytes, self._register)

    async def list_files(self, *, purpose: str | None, limit: int, order: str, after: str | None) -> FilePage:
        """Return one page of files. Raises RequestError."""
        if order not in ("asc", "desc"):
            refuse("invalid_order", f"order is {show(order)}; give asc or desc", "order")
        check_limit(limit, MAX_FILES_LISTED)
        if after is not None:
            await self._row(after, "after")
        rows = await self._store.read(
            lambda db: list_files(db, purpose=purpose, limit=limit + 1, ascending=order == "asc", after=after)
        )
        return FilePage(data=tuple(file_object(row) for row in rows[:limit]), has_more=len(rows) > limit)

    async def get(self, file_id: str) -> FileObject:
        """Return one file. Raises RequestError."""
        running = await self._running(file_id)
        if running is not None:
            job, extents_found = running
            return running_output(job, file_id, sum(extents_found[1::2]))
        return file_object(await self._row(file_id))

    async def delete(self, file_id: str) -> None:
        """Delete a file. Raises RequestError."""
        if await self._running(file_id) is None:
            await self._row(file_id)
        job = await self._store.write(partial(delete_unless_needed, file_id=file_id))
        if job is not None:
            conflict("file_in_use", f"file {file_id} is needed by job {job}, which has not ended; cancel it first")
        await asyncio.to_thread(unlink_file, self._store, file_id)

    async def open_content(self, file_id: str) -> FileContent:
        """Open a file's bytes. Raises RequestError."""
        running = await self._running(file_id)
        if running is not None:
            job, extents_found = running
            segment = await asyncio.to_thread(_opened, self._store.directory.segment(job.id))
            if segment is not None or not extents_found:
                file = running_output(job, file_id, sum(extents_found[1::2]))
                return FileContent(file=file, num_bytes=file.bytes, chunks=segment_extents(segment, extents_found))
        row = await self._row(file_id)
        opened = await asyncio.to_thread(_opened, self._store.directory.file(file_id))
        if opened is None:
            not_found("file", file_id)
        return FileContent(file=file_object(row), num_bytes=row.num_bytes, chunks=whole_file(opened, row.num_bytes))

    async def _row(self, file_id: str, param: str | None = None) -> FileRow:
        row = await self._store.read(lambda db: get_file(db, file_id)) if is_file_id(file_id) else None
        if row is None:
            not_found("file", file_id, param)
        return row

    async def _running(self, file_id: str) -> tuple[ActiveJob, array[int]] | None:
        """Return the running job that will write this file, and the extents of the result lines readable now."""
        if not is_file_id(file_id):
            return None
        row = await self._store.read(lambda db: job_of_file(db, file_id))
        job = None if row is None else self._active(row.id)
        if row is None or job is None:
            return None
        end = job.lines.contiguous

        def read_extents(db: sqlite3.Connection) -> array[int] | None:
            found = extents(db, row.seq, end, failed=file_id == row.error_file_id)
            # Result rows are deleted only after the job's end: before it, what was found is complete.
            return found if known_job(db, row.id).ended_at is None else None

        found = await self._store.read(read_extents)
        return None if found is None else (job, found)

    async def _register(self, partial: Path, num_bytes: int, filename: str, expires_after_s: int | None) -> FileObject:
        now = int(self._clock())
        row = FileRow(
            id=new_file_id(),
            num_bytes=num_bytes,
            created_at=now,
            filename=filename,
            purpose="batch",
            expires_at=None if expires_after_s is None else now + expires_after_s,
        )
        failpoint("uploads.file_synced")

        def name_it() -> None:
            with storage_errors("storing the uploaded file"):
                self._store.directory.publish(partial, row.id)

        await asyncio.to_thread(name_it)
        failpoint("uploads.file_named")
        await self._store.write(lambda db: insert_file(db, row))
        failpoint("uploads.row_committed")
        return file_object(row)


def check_limit(limit: int, most: int) -> None:
    """Raise RequestError for a page size out of range."""
    if not 1 <= limit <= most:
        refuse("invalid_limit", f"limit is {limit}; give 1 to {most}", "limit")


def _opened(path: Path) -> BinaryIO | None:
    try:
        return path.open("rb")
    except FileNotFoundError:
        return None
