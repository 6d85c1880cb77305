"""The service as the API layer sees it: files, batches, state. It does not decide how HTTP shows any of it.

Every method raises RequestError (code, message, param, status_code: 400, 404, 409, 413, 507) for what the caller got
wrong or the disk cannot take, and nothing else on purpose.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Protocol

from sgl_batch.jobs.batch_service.objects import (
    BatchObject,
    BatchPage,
    FileContent,
    FileObject,
    FilePage,
    ServiceSnapshot,
    StorageState,
)
from sgl_batch.jobs.batch_service.settings import ServiceSettings
from sgl_batch.jobs.line_engine import EngineSource


class Upload(Protocol):
    """A file on its way to the disk: `async with await service.begin_upload() as upload`, then write and finish."""

    async def write(self, chunk: bytes) -> None:
        """Append bytes; more than the service's limit raises RequestError 413 (code file_too_large)."""
        ...

    async def finish(
        self, *, filename: str, purpose: str, expires_after: Mapping[str, object] | None = None
    ) -> FileObject:
        """Sync the file and make it a FileObject. `expires_after`: {anchor, seconds}, as given (texts are fine)."""
        ...

    async def __aenter__(self) -> Upload: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Remove what was written, unless it was finished."""
        ...


class BatchService:
    """Files and jobs in one directory, run with the engines of `engines`. Everything runs on one event loop."""

    def __init__(self, settings: ServiceSettings, engines: EngineSource) -> None:
        raise NotImplementedError

    async def start(self) -> None:
        """Open the directory, recover what was running, begin to run jobs.

        Raises ConfigError where another server holds the directory or its database is newer than this program.
        """
        raise NotImplementedError

    async def stop(self) -> None:
        """Admit nothing more, give up lines in flight, commit what is finished, let go of the directory."""
        raise NotImplementedError

    async def begin_upload(self) -> Upload:
        """A file of unknown length, to be written in chunks as they arrive."""
        raise NotImplementedError

    async def list_files(
        self, *, purpose: str | None = None, limit: int = 10_000, order: str = "desc", after: str | None = None
    ) -> FilePage:
        """Files by creation, `order` asc or desc."""
        raise NotImplementedError

    async def get_file(self, file_id: str) -> FileObject:
        """One file, or the output of a running job."""
        raise NotImplementedError

    async def delete_file(self, file_id: str) -> None:
        """Delete a file; 409 (file_in_use) while a job that has not ended needs it."""
        raise NotImplementedError

    async def open_content(self, file_id: str) -> FileContent:
        """A file's bytes; of a running job's output, the lines before the first that is not finished."""
        raise NotImplementedError

    async def create_batch(self, body: Mapping[str, object], *, idempotency_key: str | None = None) -> BatchObject:
        """Check the request body of POST /v1/batches (and its `continue_from`) and queue the job for validation.

        The same key with the same body gives the same job; with another body, 409 (idempotency_key_reused).
        """
        raise NotImplementedError

    async def get_batch(self, batch_id: str) -> BatchObject:
        """One job as it is now."""
        raise NotImplementedError

    async def list_batches(self, *, limit: int = 20, after: str | None = None) -> BatchPage:
        """Jobs, newest first."""
        raise NotImplementedError

    async def cancel_batch(self, batch_id: str) -> BatchObject:
        """Begin to cancel; a job that has ended raises 409 (batch_not_cancellable); it may be asked for twice."""
        raise NotImplementedError

    def snapshot(self) -> ServiceSnapshot:
        """The service at this moment."""
        raise NotImplementedError

    @property
    def storage(self) -> StorageState:
        """Whether the directory takes writes."""
        raise NotImplementedError
