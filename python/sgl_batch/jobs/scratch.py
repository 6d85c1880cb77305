"""Owns private files: temporary SQLite databases, and the modes and errors of all files of a job."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sgl_batch.errors import SglBatchError

CACHE_KIB = 4096
PRIVATE_MODE = 0o600  # only the owner may read prompts and answers, whatever the umask is


class StorageError(SglBatchError):
    """A file of a job cannot be written or read (disk full, permission, input/output error)."""


@contextmanager
def storage_errors(doing: str) -> Iterator[None]:
    """Turn errors of the disk into StorageError, which says what was being done."""
    try:
        yield
    except (OSError, sqlite3.Error) as error:
        raise StorageError(f"{doing} failed: {error}") from error


def private_opener(path: str, flags: int) -> int:
    """Open a file so that only its owner may read it, for `open(..., opener=private_opener)`."""
    return os.open(path, flags, PRIVATE_MODE)


def make_private(path: Path) -> None:
    """Make a file private, and create it empty if it is missing. SQLite itself follows the umask. Raises OSError."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, PRIVATE_MODE)
    try:
        os.fchmod(descriptor, PRIVATE_MODE)
    finally:
        os.close(descriptor)


def open_scratch(path: Path) -> sqlite3.Connection:
    """Open a throw-away database: bounded cache, no journal, one transaction, worthless after a crash."""
    with storage_errors(f"opening the temporary file {path}"):
        make_private(path)
        connection = sqlite3.connect(path, isolation_level=None)
        connection.execute("PRAGMA journal_mode = OFF")
        connection.execute("PRAGMA synchronous = OFF")
        connection.execute("PRAGMA locking_mode = EXCLUSIVE")
        connection.execute(f"PRAGMA cache_size = -{CACHE_KIB}")
        connection.execute("BEGIN")
    return connection
