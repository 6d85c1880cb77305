"""Owns one file that grows by whole lines."""

from __future__ import annotations

import os
from io import FileIO
from pathlib import Path

from sgl_batch.jobs.scratch import storage_errors


class LineFile:
    """A file of whole lines, unbuffered, so that `tail -f` shows an appended line at once.

    `create` or the first `append` creates it. When an append fails half way (disk full), the file is cut back
    to its last whole line.
    """

    def __init__(self, path: Path, *, overwrite: bool = False) -> None:
        self.path = path
        self.num_lines = 0
        self._overwrite = overwrite
        self._file: FileIO | None = None
        self._num_bytes = 0

    def create(self) -> FileIO:
        """Create the file, empty. Raises StorageError where one exists and may not be overwritten."""
        with storage_errors(f"creating {self.path}"):
            self._file = FileIO(self.path, "wb" if self._overwrite else "xb")
        return self._file

    def go_on(self, num_lines: int) -> None:
        """Continue an existing file of `num_lines` whole lines; a missing one is created by the first `append`."""
        with storage_errors(f"opening {self.path}"):
            if self.path.exists():
                self._file = FileIO(self.path, "rb+")
                self._num_bytes = self._file.seek(0, os.SEEK_END)
                self.num_lines = num_lines

    def append(self, lines: list[bytes]) -> None:
        """Append result lines, each with its newline."""
        if not lines:
            return
        file = self._file or self.create()
        data = memoryview(b"".join(lines))
        with storage_errors(f"writing {self.path}"):
            try:
                written = 0
                while written < len(data):
                    written += file.write(data[written:]) or 0
            except OSError:
                file.truncate(self._num_bytes)
                file.seek(self._num_bytes)
                raise
        self._num_bytes += len(data)
        self.num_lines += len(lines)

    def sync(self) -> None:
        """Wait until what was appended is on the disk."""
        if self._file is not None:
            with storage_errors(f"syncing {self.path}"):
                os.fsync(self._file.fileno())

    def close(self) -> None:
        """Sync and close."""
        if self._file is not None:
            try:
                self.sync()
            finally:
                self._file.close()
                self._file = None

    def discard(self) -> None:
        """Close without syncing, and remove the file."""
        if self._file is not None:
            self._file.close()
            self._file = None
        with storage_errors(f"removing {self.path}"):
            self.path.unlink(missing_ok=True)
