"""Downloads a job's files, whole or not at all, and decides which of its files is its output."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import BinaryIO, Protocol, TextIO

from sgl_batch.byte_sizes import format_bytes
from sgl_batch.cli.jobs.cards import ENDED, extra
from sgl_batch.cli.jobs.client import Job
from sgl_batch.errors import ConfigError
from sgl_batch.jobs.scratch import StorageError

SHOW_EVERY_BYTES = 4 << 20


class Contents(Protocol):
    """Opens a file of the server."""

    def __call__(self, file_id: str) -> AbstractContextManager[tuple[int | None, Iterator[bytes]]]:
        """Give its length, if known, and its bytes as they come."""
        ...


def file_of(job: Job, kind: str, *, partial: bool) -> str | None:
    """Return the id of a job's `output` or `error` file; None where it has none (no line succeeded, or none failed).

    Raises ConfigError for a job that has not ended, unless `partial`.
    """
    field = f"{kind}_file_id"
    if job.get("status") in ENDED:
        found = job.get(field)
        return str(found) if found else None
    if not partial:
        raise ConfigError(
            f"job {job['id']} is {job.get('status')} and has no whole {kind} yet: wait for it with `sgl-batch jobs "
            f"watch {job['id']}`, or give --partial for the finished beginning"
        )
    found = extra(job).get(field)
    if not found:
        raise ConfigError(f"job {job['id']} is {job.get('status')}, and its server has no part of its {kind} yet")
    return str(found)


def download(open_content: Contents, file_id: str, target: Path, show: Callable[[int, int | None], None]) -> int:
    """Download a file, and give it its name when it is whole and on the disk. Return its size in bytes."""
    try:
        descriptor, name = tempfile.mkstemp(prefix=f".{target.name}.", suffix=".part", dir=target.parent)
        draft = Path(name)
        try:
            with os.fdopen(descriptor, "wb") as file:
                num_bytes = copy(open_content, file_id, file, show)
                file.flush()
                os.fsync(file.fileno())
            draft.chmod(0o666 & ~_umask())
            draft.replace(target)
        finally:
            draft.unlink(missing_ok=True)
    except OSError as error:
        raise StorageError(f"writing {target} failed: {error}") from error
    return num_bytes


def copy(open_content: Contents, file_id: str, file: BinaryIO, show: Callable[[int, int | None], None]) -> int:
    """Copy a file of the server to an open file. Return its size in bytes."""
    num_bytes = 0
    with open_content(file_id) as (length, chunks):
        for chunk in chunks:
            file.write(chunk)
            num_bytes += len(chunk)
            show(num_bytes, length)
    if length is not None and num_bytes != length:
        raise StorageError(f"file {file_id} came with {num_bytes:,} of its {length:,} bytes; download it again")
    return num_bytes


class BytesShown:
    """Shows on one line of a terminal how much has come. It is silent elsewhere."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._is_on = stream.isatty()
        self._shown = 0

    def __call__(self, num_bytes: int, length: int | None) -> None:
        """Show the progress, every 4 MiB."""
        if self._is_on and num_bytes - self._shown >= SHOW_EVERY_BYTES:
            self._shown = num_bytes
            whole = "" if length is None else f" of {format_bytes(length)} ({100 * num_bytes / max(length, 1):.0f}%)"
            with suppress(OSError):
                self._stream.write(f"\r\x1b[K{format_bytes(num_bytes)}{whole}")
                self._stream.flush()

    def end(self) -> None:
        """Clear the line."""
        if self._is_on and self._shown:
            with suppress(OSError):
                self._stream.write("\r\x1b[K")
                self._stream.flush()


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
