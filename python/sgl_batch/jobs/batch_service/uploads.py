"""Owns the upload of one file: writes the pieces as they come, up to the limit, and syncs the file."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Mapping
from io import FileIO
from pathlib import Path
from types import TracebackType

from sgl_batch.errors import RequestError
from sgl_batch.jobs.batch_service.batch_request import parse_expiry
from sgl_batch.jobs.batch_service.objects import FileObject
from sgl_batch.jobs.body_rules import refuse, show
from sgl_batch.jobs.scratch import StorageError, private_opener, storage_errors

WRITE_BYTES = 1 << 20
MAX_FILENAME_CHARACTERS = 255


class FileUpload:
    """One upload, as an async context manager. Leaving it without `finish` removes what was written.

    `register(partial, num_bytes, filename, expires_after)` gives the synced file its name and row.
    """

    def __init__(
        self,
        partial: Path,
        max_bytes: int,
        register: Callable[[Path, int, str, int | None], Awaitable[FileObject]],
    ) -> None:
        self._partial = partial
        self._max_bytes = max_bytes
        self._register = register
        self._file: FileIO | None = None
        self._buffer = bytearray()
        self._num_bytes = 0

    async def write(self, chunk: bytes) -> None:
        """Append bytes. Raises RequestError: 413 beyond the limit, 507 where the disk does not take them."""
        self._num_bytes += len(chunk)
        if self._num_bytes > self._max_bytes:
            raise RequestError(
                code="file_too_large",
                message=f"the file has more than {self._max_bytes:,} bytes, the limit; split it",
                param="file",
                status_code=413,
            )
        self._buffer += chunk
        if len(self._buffer) >= WRITE_BYTES:
            await self._to_thread(self._write_buffer)

    async def finish(
        self, *, filename: str, purpose: str, expires_after: Mapping[str, object] | None = None
    ) -> FileObject:
        """Sync the file and register it. It is durable when this returns. Raises RequestError."""
        if purpose != "batch":
            refuse("invalid_purpose", f'purpose is {show(purpose)}; the only one is "batch"', "purpose")
        name = filename.encode("utf-8", "replace").decode("utf-8")[:MAX_FILENAME_CHARACTERS]
        expires_after_s = parse_expiry(expires_after, "expires_after")
        await self._to_thread(self._sync)
        try:
            return await self._register(self._partial, self._num_bytes, name, expires_after_s)
        except StorageError as error:
            raise storage_refusal(error) from error

    async def __aenter__(self) -> FileUpload:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            self._file.close()
        await asyncio.to_thread(self._partial.unlink, missing_ok=True)

    async def _to_thread(self, work: Callable[[], None]) -> None:
        try:
            await asyncio.to_thread(work)
        except StorageError as error:
            raise storage_refusal(error) from error

    def _write_buffer(self) -> None:
        with storage_errors("writing the uploaded file"):
            if self._file is None:
                self._file = FileIO(self._partial, "xb", opener=private_opener)
            data, self._buffer = memoryview(bytes(self._buffer)), bytearray()
            written = 0
            while written < len(data):
                written += self._file.write(data[written:]) or 0

    def _sync(self) -> None:
        self._write_buffer()
        with storage_errors("syncing the uploaded file"):
            assert self._file is not None, "writing has opened it"
            os.fsync(self._file.fileno())


def storage_refusal(error: StorageError) -> RequestError:
    """Return the RequestError for a write that the disk does not take."""
    return RequestError(
        code="storage_failed",
        message=f"{error}. Make room in the jobs directory, or mend its disk, and send the request again",
        status_code=507,
    )
