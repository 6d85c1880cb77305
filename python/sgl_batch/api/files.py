"""Owns the routes of /v1/files: uploads as they arrive, listings, contents. The batch service owns the files."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.requests import ClientDisconnect

from sgl_batch.api.multipart import Form, read_form
from sgl_batch.errors import RequestError
from sgl_batch.jobs.batch_service.objects import FileObject
from sgl_batch.jobs.batch_service.service import BatchService

_PURPOSES = ("batch",)


def files_router(service: BatchService) -> APIRouter:
    """Return the routes of /v1/files."""
    router = APIRouter(prefix="/v1/files")

    @router.post("")
    async def upload(request: Request) -> JSONResponse:
        return JSONResponse((await _upload(service, request)).to_openai())

    @router.get("")
    async def listing(
        purpose: str | None = None,
        limit: Annotated[int, Query(ge=1, le=10_000)] = 10_000,
        order: Literal["asc", "desc"] = "desc",
        after: str | None = None,
    ) -> JSONResponse:
        page = await service.list_files(purpose=purpose, limit=limit, order=order, after=after)
        return JSONResponse(page.to_openai())

    @router.get("/{file_id}")
    async def one(file_id: str) -> JSONResponse:
        return JSONResponse((await service.get_file(file_id)).to_openai())

    @router.delete("/{file_id}")
    async def delete(file_id: str) -> JSONResponse:
        await service.delete_file(file_id)
        return JSONResponse({"id": file_id, "object": "file", "deleted": True})

    @router.get("/{file_id}/content")
    async def content(file_id: str) -> StreamingResponse:
        opened = await service.open_content(file_id)
        headers = {
            "Content-Length": str(opened.num_bytes),
            # The user's name of the file is not repeated here: a header could give it a meaning.
            "Content-Disposition": f'attachment; filename="{opened.file.id}.jsonl"',
            "X-Content-Type-Options": "nosniff",
        }
        return StreamingResponse(_closing(opened.chunks), media_type="application/octet-stream", headers=headers)

    return router


async def _upload(service: BatchService, request: Request) -> FileObject:
    """Write the file of a form as it arrives, and return it."""
    try:
        async with await service.begin_upload() as upload:
            content_type = request.headers.get("content-type", "")
            form = await read_form(content_type, request.stream(), upload.write, file_field="file")
            return await upload.finish(
                filename=form.filename or "",
                purpose=_purpose(form),
                expires_after=_expires_after(form),
            )
    except ClientDisconnect as error:
        raise RequestError(code="upload_cut_off", message="the client went away during the upload") from error


async def _closing(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Yield the chunks, and close the file when the reader stops."""
    try:
        async for chunk in chunks:
            yield chunk
    finally:
        if isinstance(chunks, AsyncGenerator):
            await chunks.aclose()


def _purpose(form: Form) -> str:
    purpose = form.fields.get("purpose")
    if purpose not in _PURPOSES:
        given = "missing" if purpose is None else f"{purpose!r}"
        raise RequestError(
            code="invalid_purpose", message=f"purpose is {given}; it must be 'batch' here", param="purpose"
        )
    return purpose


def _expires_after(form: Form) -> dict[str, Any] | None:
    prefix = "expires_after["
    found = {
        name.removeprefix(prefix).removesuffix("]"): value
        for name, value in form.fields.items()
        if name.startswith(prefix) and name.endswith("]")
    }
    return found or None
