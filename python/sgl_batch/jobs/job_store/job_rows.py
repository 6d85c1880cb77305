"""Owns the SQL of jobs. lifecycle.py decides which status a job may have."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields

# Each way to end has its time; a job has ended when one of them is set.
NOT_ENDED = "coalesce(completed_at, failed_at, expired_at, cancelled_at) IS NULL"


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRow:
    """A job's row. The scripts in migrations/ say what the columns mean."""

    seq: int = 0  # given by the database
    id: str
    status: str
    endpoint: str
    completion_window: str
    input_file_id: str
    metadata: str | None
    seed: int
    output_expires_after: int | None
    continue_from: str | None
    taken_over: int
    output_file_id: str
    error_file_id: str
    has_output: int = 0
    has_errors: int = 0
    model: str | None = None
    total: int = 0
    line_offsets: bytes | None = None
    estimated_prompt_tokens: int = 0
    estimated_output_tokens: int = 0
    longest_output: int = 0
    errors: str | None = None
    completed: int = 0
    failed: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    reasoning_tokens: int = 0
    engine_s: float = 0.0
    engine_lines: int = 0
    engine_input_tokens: int = 0
    engine_output_tokens: int = 0
    segment_bytes: int = 0
    created_at: int
    expires_at: int
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    input_filename: str | None = None  # from the file's row, while it exists

    @property
    def ended_at(self) -> int | None:
        """When the job ended, or None."""
        return self.completed_at or self.failed_at or self.expired_at or self.cancelled_at


_NAMES = tuple(one.name for one in fields(JobRow) if one.name != "input_filename")
# A million lines have 16 KB of offsets: only the function `line_offsets` reads them.
_COLUMNS = ", ".join("NULL" if name == "line_offsets" else name for name in _NAMES)
_FILENAME = "(SELECT filename FROM files WHERE files.id = jobs.input_file_id)"


def insert_job(connection: sqlite3.Connection, row: JobRow) -> None:
    """Add a job."""
    names = [name for name in _NAMES if name != "seq"]
    sql = f"INSERT INTO jobs ({', '.join(names)}) VALUES ({', '.join('?' * len(names))})"
    connection.execute(sql, [getattr(row, name) for name in names])


def get_job(connection: sqlite3.Connection, job_id: str) -> JobRow | None:
    """Return the job of this id without its line offsets, or None."""
    return next(_select(connection, "WHERE id = ?", job_id), None)


def known_job(connection: sqlite3.Connection, job_id: str) -> JobRow:
    """Return a job that exists. No job is ever deleted."""
    row = get_job(connection, job_id)
    assert row is not None, f"job {job_id} is gone"
    return row


def job_of_file(connection: sqlite3.Connection, file_id: str) -> JobRow | None:
    """Return the job whose output or errors go to this file, or None."""
    return next(_select(connection, "WHERE output_file_id = ? OR error_file_id = ?", file_id, file_id), None)


def list_jobs(connection: sqlite3.Connection, *, limit: int, after: str | None) -> list[JobRow]:
    """Return up to `limit` jobs, newest first, created before the job `after`."""
    if after is None:
        return list(_select(connection, "ORDER BY seq DESC LIMIT ?", limit))
    where = "WHERE seq < (SELECT seq FROM jobs WHERE id = ?) ORDER BY seq DESC LIMIT ?"
    return list(_select(connection, where, after, limit))


def jobs_not_ended(connection: sqlite3.Connection) -> list[JobRow]:
    """Return the jobs that have not ended, oldest first."""
    return list(_select(connection, f"WHERE is_tidy = 0 AND {NOT_ENDED} ORDER BY seq"))


def jobs_not_tidy(connection: sqlite3.Connection) -> list[JobRow]:
    """Return the ended jobs whose segment and result rows may still exist."""
    return list(_select(connection, f"WHERE is_tidy = 0 AND NOT ({NOT_ENDED}) ORDER BY seq"))


def count_by_status(connection: sqlite3.Connection) -> dict[str, int]:
    """Return how many jobs have each status."""
    return {str(row[0]): int(row[1]) for row in connection.execute("SELECT status, count(*) FROM jobs GROUP BY status")}


def line_offsets(connection: sqlite3.Connection, job_id: str) -> bytes:
    """Return where every 1000th line of a validated job begins, packed."""
    (offsets,) = connection.execute("SELECT line_offsets FROM jobs WHERE id = ?", (job_id,)).fetchone()
    assert offsets is not None, f"job {job_id} is not validated"
    return bytes(offsets)


def update_job(connection: sqlite3.Connection, job_id: str, changes: Mapping[str, object]) -> None:
    """Set columns of a job."""
    assert set(changes) <= {*_NAMES, "is_tidy"}, f"no such columns: {sorted(set(changes) - set(_NAMES))}"
    sets = ", ".join(f"{name} = ?" for name in changes)
    changed = connection.execute(f"UPDATE jobs SET {sets} WHERE id = ?", (*changes.values(), job_id)).rowcount
    assert changed == 1, f"job {job_id} is not there"


def find_idempotency_key(connection: sqlite3.Connection, key: str) -> tuple[bytes, str] | None:
    """Return the digest of the body and the id of the job made under this key, or None."""
    row = connection.execute("SELECT body_digest, job FROM idempotency_keys WHERE key = ?", (key,)).fetchone()
    return (bytes(row[0]), str(row[1])) if row else None


def insert_idempotency_key(connection: sqlite3.Connection, key: str, body_digest: bytes, job_id: str) -> None:
    """Remember which job was made under this key."""
    connection.execute("INSERT INTO idempotency_keys VALUES (?, ?, ?)", (key, body_digest, job_id))


def _select(connection: sqlite3.Connection, rest: str, *values: object) -> Iterator[JobRow]:
    names = (*_NAMES, "input_filename")
    for row in connection.execute(f"SELECT {_COLUMNS}, {_FILENAME} FROM jobs {rest}", values):
        yield JobRow(**dict(zip(names, row, strict=True)))
