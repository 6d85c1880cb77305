"""Owns the segments: files with a job's result lines in the order of their commits."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

from sgl_batch.jobs.failpoints import failpoint
from sgl_batch.jobs.job_store.directory import sync_directory
from sgl_batch.jobs.scratch import PRIVATE_MODE

_MAX_OPEN = 64
_WRITE_BYTES = 1 << 30  # Linux writes less than 2 GiB at a time


class Segments:
    """The open segments. Bytes beyond the committed ones are worthless, and the next write replaces them."""

    def __init__(self) -> None:
        self._open: OrderedDict[Path, int] = OrderedDict()

    def write(self, path: Path, committed_bytes: int, result_lines: Sequence[bytes]) -> list[int]:
        """Write result lines behind the committed bytes and sync. Return the offset of each. Raises OSError."""
        descriptor = self._descriptor(path)
        data = memoryview(b"".join(result_lines))
        written = 0
        while written < len(data):
            written += os.pwrite(descriptor, data[written : written + _WRITE_BYTES], committed_bytes + written)
        failpoint("committer.segment_written")
        os.fsync(descriptor)
        failpoint("committer.segment_synced")
        offsets, offset = [], committed_bytes
        for result_line in result_lines:
            offsets.append(offset)
            offset += len(result_line)
        return offsets

    def close(self, path: Path) -> None:
        """Close one segment, if it is open."""
        descriptor = self._open.pop(path, None)
        if descriptor is not None:
            os.close(descriptor)

    def close_all(self) -> None:
        """Close every segment."""
        for path in list(self._open):
            self.close(path)

    def _descriptor(self, path: Path) -> int:
        if path in self._open:
            self._open.move_to_end(path)
            return self._open[path]
        while len(self._open) >= _MAX_OPEN:
            self.close(next(iter(self._open)))
        is_new = not path.exists()
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, PRIVATE_MODE)
        self._open[path] = descriptor
        if is_new:
            sync_directory(path.parent)
        return descriptor


def cut(path: Path, committed_bytes: int) -> None:
    """Cut off what lies beyond the committed bytes. Raises OSError, also where committed bytes are missing."""
    if not path.exists():
        if committed_bytes:
            raise FileNotFoundError(f"{path} is gone, and {committed_bytes} bytes of it were committed")
        return
    size = path.stat().st_size
    if size < committed_bytes:
        raise OSError(f"{path} has {size} bytes, and {committed_bytes} were committed")
    if size > committed_bytes:
        os.truncate(path, committed_bytes)
