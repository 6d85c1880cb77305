"""Finished records that wait on disk for an earlier line; decides nothing about when they are written."""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass
from pathlib import Path

from sgl_batch.jobs.scratch import open_scratch, storage_errors


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """The record of a finished line and whether it belongs in the error file."""

    index: int
    record: bytes
    failed: bool


class Spool:
    """Records by line index, in a temporary file that is made on first use."""

    def __init__(self, path: Path) -> None:
        self.num_records = 0
        self._path = path
        self._opened: sqlite3.Connection | None = None

    def put(self, finished: Finished) -> None:
        """Keep one record; its index is not yet in the spool."""
        with storage_errors(f"writing the temporary file {self._path}"):
            self._db().execute("INSERT INTO spool VALUES (?, ?, ?)", (finished.index, finished.failed, finished.record))
        self.num_records += 1

    def take(self, index: int) -> Finished | None:
        """Remove and return the record at `index`, if it is here."""
        return self._take_where("line = ?", (index,)) if self.num_records else None

    def take_first(self) -> Finished | None:
        """Remove and return the record with the lowest index, if any is left."""
        return self._take_where("line = (SELECT min(line) FROM spool)", ()) if self.num_records else None

    def close(self) -> None:
        """Remove the file with all that is in it."""
        if self._opened is not None:
            self._opened.close()
            self._opened = None
        self._path.unlink(missing_ok=True)

    def _take_where(self, condition: str, values: tuple[int, ...]) -> Finished | None:
        with storage_errors(f"reading the temporary file {self._path}"):
            row = self._db().execute(f"SELECT line, failed, record FROM spool WHERE {condition}", values).fetchone()
            if row is None:
                return None
            self._db().execute("DELETE FROM spool WHERE line = ?", (row[0],))
        self.num_records -= 1
        return Finished(index=row[0], failed=bool(row[1]), record=row[2])

    def _db(self) -> sqlite3.Connection:
        if self._opened is None:
            self._opened = open_scratch(self._path)
            self._opened.execute("CREATE TABLE spool (line INTEGER PRIMARY KEY, failed INTEGER, record BLOB)")
        return self._opened
