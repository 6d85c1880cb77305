"""Temporary SQLite files for what must not stay in memory; decides nothing about what is put there."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sgl_batch.errors import SglBatchError

CACHE_KIB = 4096
PRIVATE_MODE = 0o600  # prompts and answers are their owner's alone, whatever the umask says


class StorageError(SglBatchError):
    """A file of the job cannot be written or read (disk full, permission, input/output error)."""


@contextmanager
def storage_errors(doing: str) -> Iterator[None]:
    """Turn errors of the disk into StorageError saying what was being done."""
    try:
        yield
    except (OSError, sqlite3.Error) as error:
        raise StorageError(f"{doing} failed: {error}") from error


def private_opener(path: str, flags: int) -> int:
    """For `open(..., opener=private_opener)`: a file that is made then is its owner's alone."""
    return os.open(path, flags, PRIVATE_MODE)


def make_private(path: Path) -> None:
    """Make an empty file unless there is one, its owner's alone: SQLite by itself asks the umask. Raises OSError."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, PRIVATE_MODE)
    try:
        os.fchmod(descriptor, PRIVATE_MODE)
    finally:
        os.close(descriptor)


def open_scratch(path: Path) -> sqlite3.Connection:
    """Open a throw-away database: bounded cache, no journal, one transaction, of no use after a crash."""
    with storage_errors(f"opening the temporary file {path}"):
        make_private(path)
        connection = sqlite3.connect(path, isolation_level=None)
        connection.execute("PRAGMA journal_mode = OFF")
        connection.execute("PRAGMA synchronous = OFF")
        connection.execute("PRAGMA locking_mode = EXCLUSIVE")
        connection.execute(f"PRAGMA cache_size = -{CACHE_KIB}")
        connection.execute("BEGIN")
    return connection
