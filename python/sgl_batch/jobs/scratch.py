"""Temporary SQLite files for what must not stay in memory; decides nothing about what is put there."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sgl_batch.errors import SglBatchError

CACHE_KIB = 4096


class StorageError(SglBatchError):
    """A file of the job cannot be written or read (disk full, permission, input/output error)."""


@contextmanager
def storage_errors(doing: str) -> Iterator[None]:
    """Turn errors of the disk into StorageError saying what was being done."""
    try:
        yield
    except (OSError, sqlite3.Error) as error:
        raise StorageError(f"{doing} failed: {error}") from error


def open_scratch(path: Path) -> sqlite3.Connection:
    """Open a throw-away database: bounded cache, no journal, one transaction, of no use after a crash."""
    with storage_errors(f"opening the temporary file {path}"):
        connection = sqlite3.connect(path, isolation_level=None)
        connection.execute("PRAGMA journal_mode = OFF")
        connection.execute("PRAGMA synchronous = OFF")
        connection.execute("PRAGMA locking_mode = EXCLUSIVE")
        connection.execute(f"PRAGMA cache_size = -{CACHE_KIB}")
        connection.execute("BEGIN")
    return connection
