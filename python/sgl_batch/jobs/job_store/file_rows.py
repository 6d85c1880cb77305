"""Owns the SQL of files."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields

from sgl_batch.jobs.job_store.job_rows import NOT_ENDED


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRow:
    """One whole file. `expires_at` is None for a file that does not expire."""

    id: str
    num_bytes: int
    created_at: int
    filename: str
    purpose: str
    expires_at: int | None


_COLUMNS = ", ".join(one.name for one in fields(FileRow))


def insert_file(connection: sqlite3.Connection, row: FileRow) -> None:
    """Add a file. It lies whole and synced under its id already."""
    values = [getattr(row, one.name) for one in fields(FileRow)]
    connection.execute(f"INSERT INTO files ({_COLUMNS}) VALUES ({', '.join('?' * len(values))})", values)


def get_file(connection: sqlite3.Connection, file_id: str) -> FileRow | None:
    """Return the file of this id, or None."""
    return next(_rows(connection.execute(f"SELECT {_COLUMNS} FROM files WHERE id = ?", (file_id,))), None)


def list_files(
    connection: sqlite3.Connection, *, purpose: str | None, limit: int, ascending: bool, after: str | None
) -> list[FileRow]:
    """Return up to `limit` files in the order of creation, from the one after the file `after`."""
    comes_after, order = (">", "ASC") if ascending else ("<", "DESC")
    where, values = ["1"], []
    if purpose is not None:
        where.append("purpose = ?")
        values.append(purpose)
    if after is not None:
        where.append(f"seq {comes_after} (SELECT seq FROM files WHERE id = ?)")
        values.append(after)
    sql = f"SELECT {_COLUMNS} FROM files WHERE {' AND '.join(where)} ORDER BY seq {order} LIMIT {limit:d}"
    return list(_rows(connection.execute(sql, values)))


def delete_file(connection: sqlite3.Connection, file_id: str) -> bool:
    """Delete a file's row. Return whether there was one."""
    return connection.execute("DELETE FROM files WHERE id = ?", (file_id,)).rowcount > 0


def job_needing(connection: sqlite3.Connection, file_id: str) -> str | None:
    """Return a job that has not ended and reads this file or will write it, or None."""
    row = connection.execute(
        f"""SELECT id FROM jobs WHERE {NOT_ENDED} AND (
            ? IN (input_file_id, output_file_id, error_file_id)
            OR (taken_over = 0 AND continue_from IN (SELECT id FROM jobs WHERE output_file_id = ?)))""",
        (file_id, file_id),
    ).fetchone()
    return str(row[0]) if row else None


def expired_files(connection: sqlite3.Connection, now: int) -> list[str]:
    """Return the files that have expired."""
    return [str(row[0]) for row in connection.execute("SELECT id FROM files WHERE expires_at <= ?", (now,))]


def unknown_files(connection: sqlite3.Connection, ids: Iterable[str]) -> list[str]:
    """Return those of `ids` that have no row."""
    known = {str(row[0]) for row in connection.execute("SELECT id FROM files")}
    return [one for one in ids if one not in known]


def _rows(cursor: sqlite3.Cursor) -> Iterator[FileRow]:
    names = [one.name for one in fields(FileRow)]
    return (FileRow(**dict(zip(names, row, strict=True))) for row in cursor)
