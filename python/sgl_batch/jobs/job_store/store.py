"""Owns the threads of the database: one writes, another reads, and the event loop blocks on neither.

The SQL is in the *_rows modules.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from sgl_batch.jobs.job_store.database import connect, migrate, transaction
from sgl_batch.jobs.job_store.directory import JobsDirectory
from sgl_batch.jobs.scratch import storage_errors

T = TypeVar("T")


class _DatabaseThread:
    """One thread with one connection. After an error the connection is replaced: its state is not trusted."""

    def __init__(self, directory: JobsDirectory, name: str) -> None:
        self._directory = directory
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)
        self._connection: sqlite3.Connection | None = None

    async def run(self, work: Callable[[sqlite3.Connection], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._executor, self._with_connection, work)

    def close(self) -> None:
        self._executor.submit(self._drop).result()
        self._executor.shutdown()

    def _with_connection(self, work: Callable[[sqlite3.Connection], T]) -> T:
        with storage_errors(f"using {self._directory.database}"):
            try:
                if self._connection is None:
                    self._connection = connect(self._directory.database)
                return work(self._connection)
            except (OSError, sqlite3.Error):
                self._drop()
                raise

    def _drop(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


class JobStore:
    """The jobs directory and its database, locked from `open` to `close`."""

    def __init__(self, directory: JobsDirectory) -> None:
        self.directory = directory
        self._writer = _DatabaseThread(directory, "jobs-writer")
        self._reader = _DatabaseThread(directory, "jobs-reader")

    def open(self) -> None:
        """Lock the directory and bring its database up to date. Raises ConfigError or StorageError."""
        self.directory.acquire()
        try:
            with storage_errors(f"opening {self.directory.database}"):
                connection = connect(self.directory.database)
                try:
                    migrate(connection, self.directory.database)
                finally:
                    connection.close()
        except BaseException:
            self.directory.release()
            raise

    def close(self) -> None:
        """Close the connections and release the directory."""
        self._writer.close()
        self._reader.close()
        self.directory.release()

    async def write(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """Run `work` in a transaction of its own. When this returns, it is on the disk. Raises StorageError."""

        def in_transaction(connection: sqlite3.Connection) -> T:
            with transaction(connection):
                return work(connection)

        return await self._writer.run(in_transaction)

    async def on_writer(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """Run `work`, which makes its own transactions, in the writing thread. Raises StorageError."""
        return await self._writer.run(work)

    async def read(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """Run `work`, which writes nothing, in the reading thread. Raises StorageError."""
        return await self._reader.run(work)
