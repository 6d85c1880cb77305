"""Owns which custom_ids a job has used, on disk."""

from __future__ import annotations

from hashlib import blake2b
from pathlib import Path

from sgl_batch.jobs.scratch import open_scratch, storage_errors


class SeenIds:
    """A set of custom_ids in bounded memory: 16-byte digests in a temporary file, with the line of each."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._db = open_scratch(path)
        with storage_errors(f"preparing {path}"):
            self._db.execute("CREATE TABLE seen (digest BLOB PRIMARY KEY, line INTEGER) WITHOUT ROWID")

    def claim(self, custom_id: str, line: int) -> int | None:
        """Note that `line` uses `custom_id`. Return the earlier line that uses it, or None."""
        digest = blake2b(custom_id.encode("utf-8"), digest_size=16).digest()
        with storage_errors(f"recording a custom_id in {self._path}"):
            added = self._db.execute("INSERT OR IGNORE INTO seen VALUES (?, ?)", (digest, line)).rowcount
            if added:
                return None
            row = self._db.execute("SELECT line FROM seen WHERE digest = ?", (digest,)).fetchone()
        return int(row[0])

    def close(self) -> None:
        """Remove the file."""
        self._db.close()
        self._path.unlink(missing_ok=True)
