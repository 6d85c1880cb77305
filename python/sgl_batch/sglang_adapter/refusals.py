"""Adapts the errors of SGLang's endpoints: the code and field of a refused request reach the client.

SGLang's own handlers pass on the message only. The callers decide which requests are refused.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

from sgl_batch.sglang_adapter import bootstrap
from sgl_batch.sglang_adapter.names import ENGINE_ABORT

with bootstrap.importing():
    import sglang.srt.entrypoints.http_server as http_server_module
    from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest, CompletionRequest
    from sglang.srt.entrypoints.openai.serving_base import OpenAIServingBase
    from starlette.exceptions import HTTPException
    from starlette.responses import JSONResponse

Check = Callable[[Any, Mapping[str, Any]], None]
"""Checks a request of /v1/chat/completions or /v1/completions and the JSON that it was read from.

Raises RefusalError.
"""


INVALID_VALUE = "invalid_value"


class RefusalError(ValueError):
    """A request that is refused: SGLang's endpoints answer 400. `param` is the field at fault."""

    def __init__(self, message: str, *, code: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code, self.param = code, param


class EngineAbortError(HTTPException):
    """The engine ended a request that was not aborted by its user: SGLang's endpoints answer 500 with the reason."""

    code, param = ENGINE_ABORT, None

    def __init__(self, reason: str) -> None:
        super().__init__(500, f"the engine ended the request: {reason}")

    def __str__(self) -> str:
        return str(self.detail)


# The engine's names of fields, which its messages use, and where they differ OpenAI's: the first that a request has.
_OPENAI_NAMES = {
    "sampling_seed": ("seed",),
    "max_new_tokens": ("max_tokens",),
    "min_new_tokens": ("min_tokens",),
    "top_logprobs_num": ("top_logprobs", "logprobs"),
}
_PROMPTS = ("prompt", "messages")

# The OpenAI request that is being answered: errors use its names of fields.
_request: ContextVar[Any] = ContextVar("request", default=None)


def with_check(handler: Any, check: Check) -> Any:
    """Let SGLang's handler of an OpenAI endpoint answer with the codes and fields of refusals; return the handler.

    Requests over HTTP go through `check` first.
    """
    if isinstance(handler, OpenAIServingBase):
        handler.handle_request = partial(_handle, handler.handle_request, handler, check)
        handler.create_error_response = partial(_error_response, handler.create_error_response)
    return handler


async def _handle(own: Callable[..., Any], handler: Any, check: Check, request: Any, raw_request: Any) -> Any:
    try:
        if raw_request is not None and isinstance(request, ChatCompletionRequest | CompletionRequest):
            check(request, await json_of(raw_request))
    except RefusalError as refused:  # it names fields as the client did
        return handler.create_error_response(str(refused))
    token = _request.set(request)
    try:
        return await own(request, raw_request)
    except RefusalError as refused:
        return handler.create_error_response(str(refused))
    finally:
        _request.reset(token)


async def json_of(raw_request: Any) -> Mapping[str, Any]:
    """Return the JSON object of a request over HTTP. It was parsed before, and is not parsed again."""
    body = await raw_request.json()
    return body if isinstance(body, Mapping) else {}


def _error_response(own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    refused = sys.exception()  # SGLang calls this while it handles the error, and passes on its message only
    if not isinstance(refused, RefusalError | EngineAbortError):
        return own(*args, **kwargs)
    status = 400 if isinstance(refused, RefusalError) else 500
    return JSONResponse({"object": "error", **fault_of(refused)}, status_code=status)


def fault_of(refused: RefusalError | EngineAbortError) -> dict[str, Any]:
    """Return the error that a client gets: message, type, param and code."""
    message = str(refused)
    for name in _OPENAI_NAMES if _request.get() is not None else ():
        message = re.sub(rf"\b{name}\b", str(_own_name(name)), message)
    return {
        "message": message,
        "type": "invalid_request_error" if isinstance(refused, RefusalError) else "server_error",
        "param": _own_name(refused.param),
        "code": refused.code,
    }


def wrong_value(message: str, param: str | None) -> dict[str, Any]:
    """Return the error of a body with a wrong value, which no endpoint answers yet."""
    return fault_of(RefusalError(message, code=INVALID_VALUE, param=param))


def _own_name(param: str | None) -> str | None:
    """Return the name of a field in the OpenAI request that is being answered."""
    request = _request.get()
    fields = type(request).model_fields if request is not None else {}
    if not fields or param is None or param in fields:
        return param
    if param in ("json_schema", "structural_tag"):
        return "response_format" if getattr(request, "response_format", None) else "tools"
    if param == "max_new_tokens" and getattr(request, "max_completion_tokens", None) is not None:
        return "max_completion_tokens"
    names = _PROMPTS if param in ("text", "input_ids") else _OPENAI_NAMES.get(param, ())
    return next((name for name in names if name in fields), param)


@contextmanager
def on_http_server(check: Check) -> Iterator[None]:
    """Inside, SGLang's started HTTP server of this process answers as `with_check` says."""
    state = http_server_module.app.state
    for name in ("chat", "completion", "embedding", "classify", "score", "rerank"):
        with_check(getattr(state, f"openai_serving_{name}"), check)
    own = http_server_module._create_error_response
    http_server_module._create_error_response = partial(_native_error, own)
    try:
        yield
    finally:
        http_server_module._create_error_response = own


def _native_error(own: Callable[[Exception], Any], error: Exception) -> Any:
    if isinstance(error, RefusalError):
        return JSONResponse({"error": fault_of(error)}, status_code=400)
    fault = {"message": str(error), "type": "invalid_request_error", "param": None, "code": None}
    return JSONResponse({"error": fault}, status_code=400) if isinstance(error, ValueError) else own(error)
