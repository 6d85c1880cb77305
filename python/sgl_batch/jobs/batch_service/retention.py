"""Removes leftovers of a crash, expired files and deleted files."""

from __future__ import annotations

import asyncio
import sqlite3
from functools import partial

from sgl_batch.jobs.failpoints import failpoint
from sgl_batch.jobs.job_store.directory import sync_directory
from sgl_batch.jobs.job_store.file_rows import delete_file, expired_files, job_needing, unknown_files
from sgl_batch.jobs.job_store.job_rows import JobRow, jobs_not_ended, jobs_not_tidy
from sgl_batch.jobs.job_store.store import JobStore
from sgl_batch.jobs.scratch import storage_errors


async def recover(store: JobStore) -> tuple[list[JobRow], list[JobRow]]:
    """Clear what a crash left. Return the jobs that have not ended, and the ended jobs that are not tidied up."""
    store.directory.clear_leftovers()
    names = [path.name for path in (store.directory.path / "files").iterdir()]
    for unknown in await store.read(lambda db: unknown_files(db, names)):
        (store.directory.path / "files" / unknown).unlink()
    running, ended = await store.read(lambda db: (jobs_not_ended(db), jobs_not_tidy(db)))
    known = {row.id for row in (*running, *ended)}
    with storage_errors("recovering the segments"):
        for path in (store.directory.path / "segments").iterdir():
            if path.name not in known:
                path.unlink()
        sync_directory(store.directory.path / "segments")
    return running, ended


async def remove_expired(store: JobStore, now: float) -> int:
    """Delete the expired files that no job needs. Return how many."""
    removed = 0
    for file_id in await store.read(lambda db: expired_files(db, int(now))):
        if await store.write(partial(delete_unless_needed, file_id=file_id)) is None:
            removed += 1
            await asyncio.to_thread(unlink_file, store, file_id)
    return removed


def delete_unless_needed(db: sqlite3.Connection, file_id: str) -> str | None:
    """Delete the file's row. Where a job that has not ended needs the file, keep it and return that job's id."""
    job = job_needing(db, file_id)
    if job is None:
        delete_file(db, file_id)
    return job


def unlink_file(store: JobStore, file_id: str) -> None:
    """Remove a file whose row is deleted. After a crash in between, the next start removes it."""
    failpoint("retention.row_deleted")
    with storage_errors(f"deleting the file {file_id}"):
        store.directory.file(file_id).unlink(missing_ok=True)
