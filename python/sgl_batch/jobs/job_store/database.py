"""Opens the jobs' SQLite database and brings its schema up to date."""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path

from sgl_batch.errors import ConfigError
from sgl_batch.jobs.failpoints import failpoint

_CACHE_KIB = 8192
_BUSY_S = 30.0


def migrations() -> dict[int, str]:
    """Return the numbered scripts of the package, by the schema version that each makes."""
    folder = files("sgl_batch.jobs.job_store") / "migrations"
    found = {
        int(match[1]): one.read_text("utf-8")
        for one in folder.iterdir()
        if (match := re.fullmatch(r"(\d{4})_\w+\.sql", one.name))
    }
    assert sorted(found) == list(range(1, len(found) + 1)), f"migrations are not numbered in a row: {sorted(found)}"
    return found


def connect(path: Path) -> sqlite3.Connection:
    """Open a connection for one thread. Every commit is on the disk when it returns."""
    connection = sqlite3.connect(path, isolation_level=None, timeout=_BUSY_S)
    for pragma in (
        "journal_mode = WAL",
        "synchronous = FULL",
        "foreign_keys = ON",
        "temp_store = MEMORY",
        f"cache_size = -{_CACHE_KIB}",
    ):
        connection.execute(f"PRAGMA {pragma}")
    return connection


def migrate(connection: sqlite3.Connection, path: Path) -> None:
    """Bring the database to this program's version. Raises ConfigError for a newer database."""
    scripts = migrations()
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if version > len(scripts):
        raise ConfigError(
            f"{path} has version {version} and this program knows versions up to {len(scripts)}; run the newer "
            "program, or give this one its own --jobs-dir"
        )
    for number in range(version + 1, len(scripts) + 1):
        connection.executescript(f"BEGIN IMMEDIATE;\n{scripts[number]}\nPRAGMA user_version = {number};\nCOMMIT;")


@contextmanager
def transaction(connection: sqlite3.Connection) -> Iterator[None]:
    """Run the block in one transaction, which an exception rolls back."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
        failpoint("database.before_commit")
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise
    failpoint("database.committed")
