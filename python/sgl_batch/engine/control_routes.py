"""Owns the control endpoints that replace SGLang's: for profiles, and for logs of requests.

The tokenizer manager decides what is allowed.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from sgl_batch.errors import RequestError
from sgl_batch.requests.profile_limits import check_directory, limits_text
from sgl_batch.requests.request_logs import logs_text
from sgl_batch.sglang_adapter.profiling import ConfigureLoggingReq, ProfileReq

if TYPE_CHECKING:
    from sgl_batch.managers.tokenizer_manager import BatchTokenizerManager

Message = TypeVar("Message", bound=msgspec.Struct)

_METHODS = ["GET", "POST"]


def control_routes(manager: BatchTokenizerManager) -> list[Route]:
    """Return the routes that replace SGLang's at the same paths. `manager`: the tokenizer manager."""

    async def start_profile(request: Request) -> str:
        asked = await _read(request, ProfileReq)
        await manager.start_profile(asked)
        return (
            f"Start profiling. It ends by itself after {limits_text(asked.num_steps)}, whichever comes first; traces "
            f"go to {check_directory(asked.output_dir)}.\n"
        )

    async def stop_profile(_: Request) -> str:
        await manager.stop_profile()
        return "The profile has ended, and its trace is written.\n"

    async def configure_logging(request: Request) -> str:
        manager.configure_logging(await _read(request, ConfigureLoggingReq))
        if not manager.request_logger.log_requests:
            return "Requests are not logged.\n"
        return f"Requests are logged to {logs_text(manager.request_log_paths)}.\n"

    endpoints = (start_profile, stop_profile, configure_logging)
    return [Route(f"/{one.__name__}", _answered(one), methods=_METHODS, name=one.__name__) for one in endpoints]


def _answered(answer: Callable[[Request], Awaitable[str]]) -> Callable[[Request], Awaitable[Response]]:
    """Return the endpoint, which answers refusals in the shape of OpenAI's errors."""

    async def endpoint(request: Request) -> Response:
        try:
            return PlainTextResponse(await answer(request))
        except RequestError as error:
            return _error(error.status_code, error.message, error.code, error.param)
        except RuntimeError as error:  # the scheduler refuses: a profile is running already, or none is
            return _error(409, str(error), "profile_refused", None)

    return endpoint


async def _read(request: Request, kind: type[Message]) -> Message:
    """Return the body as one of SGLang's messages, with nothing set where there is no body. Raises RequestError."""
    data = await request.body()
    try:
        given = json.loads(data) if data else {}
        if not isinstance(given, dict):
            raise ValueError("it is not a JSON object")
        known = {field.name: field for field in msgspec.structs.fields(kind)}
        unknown = sorted(set(given) - set(known))
        if unknown:
            raise ValueError(f"there is no field {unknown[0]!r}; there are {', '.join(sorted(known))}")
        values = {name: msgspec.convert(value, known[name].type) for name, value in given.items()}
    except (ValueError, RecursionError, UnicodeError) as error:  # msgspec's errors are ValueErrors
        raise RequestError(code="invalid_request", message=f"the request body is wrong: {error}") from error
    return kind(**values)


def _error(status_code: int, message: str, code: str, param: str | None) -> JSONResponse:
    body = {"message": message, "type": "invalid_request_error", "param": param, "code": code}
    return JSONResponse({"error": body}, status_code)
