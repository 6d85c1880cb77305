"""Owns /openapi.json: what our operations take and answer, and the engine's operations while there is an engine.

Parameters come from the routes themselves.
"""

from __future__ import annotations

import json
from typing import Any

from fastapi import APIRouter, FastAPI
from fastapi.openapi.utils import get_openapi
from fastapi.responses import JSONResponse

from sgl_batch.api.pass_through import PassThrough

_ENGINE_WITHIN_S = 5.0
_TEXT, _NUMBER, _OBJECT = {"type": "string"}, {"type": "integer"}, {"type": "object"}
_NULLABLE_TEXT = {"type": ["string", "null"]}
_NULLABLE_NUMBER = {"type": ["integer", "null"]}


def _object(required: dict[str, Any], **others: Any) -> dict[str, Any]:
    return {"type": "object", "required": list(required), "properties": {**required, **others}}


_ERROR = _object({"error": _object({"message": _TEXT, "type": _TEXT, "param": _NULLABLE_TEXT, "code": _NULLABLE_TEXT})})
_FILE = _object(
    {"id": _TEXT, "object": {"const": "file"}, "bytes": _NUMBER, "created_at": _NUMBER, "filename": _TEXT},
    purpose=_TEXT,
    status=_TEXT,
    expires_at=_NULLABLE_NUMBER,
)
_BATCH = _object(
    {"id": _TEXT, "object": {"const": "batch"}, "endpoint": _TEXT, "input_file_id": _TEXT, "status": _TEXT},
    completion_window=_TEXT,
    created_at=_NUMBER,
    output_file_id=_NULLABLE_TEXT,
    error_file_id=_NULLABLE_TEXT,
    request_counts=_OBJECT,
    metadata={"type": ["object", "null"]},
    x_sgl_batch=_OBJECT,
)
_INSTANCE = _object(
    {"id": _TEXT, "object": {"const": "sgl_batch.instance"}, "name": _TEXT, "phase": _TEXT},
    incarnation=_NUMBER,
    node=_TEXT,
    cores=_NUMBER,
    gpus=_NUMBER,
    message=_NULLABLE_TEXT,
    restarts=_NUMBER,
    in_flight=_NUMBER,
    answered=_NUMBER,
    lines_per_s={"type": "number"},
)
_DELETED = _object({"id": _TEXT, "object": {"const": "file"}, "deleted": {"const": True}})
_EXPIRY = _object(
    {"anchor": {"const": "created_at"}, "seconds": {"type": "integer", "minimum": 3600, "maximum": 2_592_000}}
)
_NEW_BATCH = {
    "type": "object",
    "additionalProperties": False,
    "anyOf": [{"required": ["input_file_id", "endpoint", "completion_window"]}, {"required": ["continue_from"]}],
    "properties": {
        "input_file_id": _TEXT,
        "endpoint": {"enum": ["/v1/chat/completions", "/v1/completions"]},
        "completion_window": {**_TEXT, "pattern": "^[1-9][0-9]{0,2}[mhd]$"},
        "metadata": {
            "type": ["object", "null"],
            "maxProperties": 16,
            "additionalProperties": {"type": "string", "maxLength": 512},
        },
        "output_expires_after": _EXPIRY,
        "continue_from": {
            **_TEXT,
            "description": "a job that has ended: its answered lines are reused, and only the others run",
        },
    },
}
_NEW_FILE = _object(
    {"file": {"type": "string", "contentMediaType": "application/octet-stream"}, "purpose": {"const": "batch"}},
    **{
        "expires_after[anchor]": _EXPIRY["properties"]["anchor"],
        "expires_after[seconds]": _EXPIRY["properties"]["seconds"],
    },
)
_NEW_FILE["dependentRequired"] = {
    "expires_after[anchor]": ["expires_after[seconds]"],
    "expires_after[seconds]": ["expires_after[anchor]"],
}


def _list(of: dict[str, Any]) -> dict[str, Any]:
    data = {"type": "array", "items": of}
    required = {"object": {"const": "list"}, "data": data, "has_more": {"type": "boolean"}}
    return _object(required, first_id=_NULLABLE_TEXT, last_id=_NULLABLE_TEXT)


# operation -> media type and schema of its answer, and the statuses of its own errors
_ANSWERS: dict[tuple[str, str], tuple[str, dict[str, Any], tuple[int, ...]]] = {
    ("post", "/v1/files"): ("application/json", _FILE, (400, 413, 507)),
    ("get", "/v1/files"): ("application/json", _list(_FILE), (400, 404)),
    ("get", "/v1/files/{file_id}"): ("application/json", _FILE, (404,)),
    ("delete", "/v1/files/{file_id}"): ("application/json", _DELETED, (404, 409, 507)),
    ("get", "/v1/files/{file_id}/content"): ("application/octet-stream", {}, (404,)),
    ("post", "/v1/batches"): ("application/json", _BATCH, (400, 404, 409, 413, 507)),
    ("get", "/v1/batches"): ("application/json", _list(_BATCH), (400, 404)),
    ("get", "/v1/batches/{batch_id}"): ("application/json", _BATCH, (404,)),
    ("post", "/v1/batches/{batch_id}/cancel"): ("application/json", _BATCH, (404, 409, 507)),
    ("get", "/v1/sgl_batch/progress"): ("application/json", _OBJECT, ()),
    ("get", "/v1/sgl_batch/instances"): ("application/json", _list(_INSTANCE), (409,)),
    ("post", "/v1/sgl_batch/instances"): ("application/json", _INSTANCE, (409,)),
    ("post", "/v1/sgl_batch/instances/{name}/drain"): ("application/json", _INSTANCE, (404, 409)),
    ("delete", "/v1/sgl_batch/instances/{name}"): ("application/json", _INSTANCE, (404, 409)),
    ("get", "/openapi.json"): ("application/json", _OBJECT, ()),
    ("get", "/health"): ("application/json", _OBJECT, ()),
    ("get", "/metrics"): ("text/plain", _TEXT, ()),
    ("get", "/"): ("text/html", _TEXT, ()),
}
_BODIES = {
    ("post", "/v1/files"): ("multipart/form-data", _NEW_FILE),
    ("post", "/v1/batches"): ("application/json", _NEW_BATCH),
}
_WHY = {
    400: "a parameter or the body is wrong",
    401: "the API key is missing or wrong",
    403: "the request comes from a foreign origin or by a foreign host name",
    404: "there is no object with this ID",
    409: "it conflicts with the state of the file, the job or the instances",
    413: "too large",
    503: "the server is starting or ending",
    507: "the disk does not take the write",
}


def document(app: FastAPI) -> dict[str, Any]:
    """Return the OpenAPI document of our operations."""
    found = get_openapi(title="sgl_batch", version="1", routes=app.routes)
    for path, operations in found["paths"].items():
        for method, operation in operations.items():
            operation |= _described(method, path)
    found.setdefault("components", {})["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    found["components"].setdefault("schemas", {})
    for name in (
        "HTTPValidationError",
        "ValidationError",
    ):  # FastAPI's own shape of errors, which this server does not use
        found["components"]["schemas"].pop(name, None)
    return found


def _described(method: str, path: str) -> dict[str, Any]:
    media_type, schema, own = _ANSWERS[method, path]
    responses: dict[str, Any] = {"200": {"description": "done", "content": {media_type: {"schema": schema}}}}
    for status in sorted({*own, 401, 403, 503}):
        is_health = (path, status) == ("/health", 503)
        content = {"application/json": {"schema": _OBJECT if is_health else _ERROR}}
        why = "the engine does not answer" if is_health else _WHY[status]
        responses[str(status)] = {"description": why, "content": content}
    described: dict[str, Any] = {"responses": responses}
    if path.startswith("/v1/"):
        described["security"] = [{"key": []}, {}]
    if (method, path) in _BODIES:
        kind, body = _BODIES[method, path]
        described["requestBody"] = {"required": True, "content": {kind: {"schema": body}}}
    return described


def with_engine_operations(ours: dict[str, Any], engines: bytes | None) -> dict[str, Any]:
    """Return our document with the engine's operations added. Where both have an operation, ours is kept."""
    theirs = json.loads(engines) if engines else {}
    schemas = {**theirs.get("components", {}).get("schemas", {}), **ours["components"]["schemas"]}
    return {
        **ours,
        "paths": {**theirs.get("paths", {}), **ours["paths"]},
        "components": {**ours["components"], "schemas": schemas},
    }


def openapi_router(app: FastAPI, engine: PassThrough) -> APIRouter:
    """Return the route of /openapi.json."""
    router = APIRouter()

    @router.get("/openapi.json")
    async def openapi() -> JSONResponse:
        return JSONResponse(
            with_engine_operations(document(app), await engine.fetch("/openapi.json", _ENGINE_WITHIN_S))
        )

    return router
