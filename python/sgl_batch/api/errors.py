"""Owns the one shape of all errors of the server: {"error": {message, type, param, code}}."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.routing import Match

from sgl_batch.errors import RequestError

logger = logging.getLogger(__name__)

_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
CODES = {404: "not_found", 405: "method_not_allowed", 413: "request_too_large"}


def error_type(status_code: int) -> str:
    """Return OpenAI's type of an error with this status."""
    return "server_error" if status_code >= 500 else _TYPES.get(status_code, "invalid_request_error")


def error_body(status_code: int, message: str, *, code: str | None = None, param: str | None = None) -> dict[str, Any]:
    """Return the JSON of an error."""
    return {"error": {"message": message, "type": error_type(status_code), "param": param, "code": code}}


def error_response(
    status_code: int,
    message: str,
    *,
    code: str | None = None,
    param: str | None = None,
    headers: Mapping[str, str] | None = None,
) -> JSONResponse:
    """Return the response with an error."""
    return JSONResponse(error_body(status_code, message, code=code, param=param), status_code, headers=headers)


def add_error_handlers(app: FastAPI) -> None:
    """Answer every error of the app in this shape."""
    app.add_exception_handler(RequestError, _request_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(RequestValidationError, _validation_error)
    app.add_exception_handler(Exception, _fault)


def _request_error(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestError), "as it was registered"
    return error_response(error.status_code, error.message, code=error.code, param=error.param)


def _http_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException), "as it was registered"
    message, headers = str(error.detail), dict(error.headers or {})
    if error.status_code in (404, 405):
        message = f"{message}: {request.method} {request.url.path}"
    if error.status_code == 405:
        headers["Allow"] = ", ".join(sorted(_methods(request)))
    return error_response(error.status_code, message, code=CODES.get(error.status_code), headers=headers)


def _methods(request: Request) -> set[str]:
    """Return the methods that the path allows. Each route knows only its own method."""
    routes = request.app.routes
    return {
        method
        for method in ("DELETE", "GET", "HEAD", "PATCH", "POST", "PUT")
        if any(route.matches({**request.scope, "method": method})[0] is Match.FULL for route in routes)
    }


def _validation_error(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError), "as it was registered"
    first = error.errors()[0]
    param = ".".join(str(part) for part in first["loc"][1:]) or None
    given = f" (given: {first['input']!r})" if isinstance(first.get("input"), str | int | float) else ""
    return error_response(400, f"{param}: {first['msg']}{given}", code="invalid_value", param=param)


def _fault(request: Request, error: Exception) -> JSONResponse:
    logger.error("%s %s failed by a fault of the program", request.method, request.url.path, exc_info=error)
    return error_response(500, "the server failed by a fault of its own; see its log", code="internal_error")
