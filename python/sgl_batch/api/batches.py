"""Owns the routes of /v1/batches. The batch service decides what a job is and what may be done with it."""

from __future__ import annotations

import json
from typing import Annotated, Any

from fastapi import APIRouter, Header, Query, Request
from fastapi.responses import JSONResponse

from sgl_batch.errors import RequestError
from sgl_batch.jobs.batch_service.batch_creation import MAX_KEY_CHARACTERS
from sgl_batch.jobs.batch_service.service import BatchService

MAX_BODY_BYTES = 1 << 20
# For the API's description alone; the service refuses other lengths itself.
_KEY = Header(json_schema_extra={"minLength": 1, "maxLength": MAX_KEY_CHARACTERS})


def batches_router(service: BatchService) -> APIRouter:
    """Return the routes of /v1/batches."""
    router = APIRouter(prefix="/v1/batches")

    @router.post("")
    async def create(request: Request, idempotency_key: Annotated[str | None, _KEY] = None) -> JSONResponse:
        body = await read_object(request)
        batch = await service.create_batch(body, idempotency_key=idempotency_key)
        return JSONResponse(batch.to_openai())

    @router.get("")
    async def listing(
        limit: Annotated[int, Query(ge=1, le=100)] = 20,
        after: str | None = None,
    ) -> JSONResponse:
        return JSONResponse((await service.list_batches(limit=limit, after=after)).to_openai())

    @router.get("/{batch_id}")
    async def one(batch_id: str) -> JSONResponse:
        return JSONResponse((await service.get_batch(batch_id)).to_openai())

    @router.post("/{batch_id}/cancel")
    async def cancel(batch_id: str) -> JSONResponse:
        return JSONResponse((await service.cancel_batch(batch_id)).to_openai())

    return router


async def read_object(request: Request) -> dict[str, Any]:
    """Read a request's body, which must be a JSON object of at most 1 MiB. Raises RequestError."""
    data = bytearray()
    async for chunk in request.stream():
        data += chunk
        if len(data) > MAX_BODY_BYTES:
            message = f"the request body has more than {MAX_BODY_BYTES:,} bytes"
            raise RequestError(code="request_too_large", message=message, status_code=413)
    try:
        body = json.loads(bytes(data))
        # Half of a surrogate pair is valid in JSON, but can be neither stored nor sent back.
        json.dumps(body, ensure_ascii=False).encode("utf-8")
    except (UnicodeError, ValueError, RecursionError) as error:  # a number with too many digits is a ValueError
        raise RequestError(code="invalid_json", message=f"the request body is not JSON: {_reason(error)}") from error
    if not isinstance(body, dict):
        message = f"the request body is a {type(body).__name__}; it must be a JSON object"
        raise RequestError(code="invalid_json", message=message)
    return body


def _reason(error: Exception) -> str:
    """Return the reason without the text itself, which may not be encodable."""
    if isinstance(error, UnicodeEncodeError):
        return "it has half of a surrogate pair (\\ud800 to \\udfff) without the other half"
    return str(error)
