"""Adapts SGLang's HTTP server to answer a wrong body with 400, the field at fault and one sentence.

SGLang answers with its validator's list of errors and a path of this machine, or with 500 where the validator itself
fails on a value. Other errors stay as they are.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping
from typing import Any

from fastapi.exceptions import RequestValidationError
from starlette.requests import Request
from starlette.responses import JSONResponse

from sgl_batch.sglang_adapter.body_faults import first_fault, no_object
from sgl_batch.sglang_adapter.refusals import wrong_value

_VALIDATORS = "/entrypoints/openai/protocol.py"
# SGLang answers in the forms of those APIs there, and without a path.
_OTHER_APIS = ("/v1/messages", "/api/")


def refuse_wrong_bodies(app: Any) -> Callable[[], None]:
    """Let an app answer so to bodies that its validators refuse or fail on; return a function that undoes it."""
    before = dict(app.exception_handlers)
    own = before[RequestValidationError]

    async def refuse_invalid(request: Request, error: RequestValidationError) -> Any:
        if request.url.path.startswith(_OTHER_APIS):
            return await own(request, error)
        return _answer(*first_fault(error.errors(), error.body))

    app.add_exception_handler(RequestValidationError, refuse_invalid)
    for kind in (AttributeError, TypeError):
        app.add_exception_handler(kind, _refuse_unexpected)

    def undo() -> None:
        app.exception_handlers.clear()
        app.exception_handlers.update(before)

    return undo


async def _refuse_unexpected(request: Request, error: Exception) -> JSONResponse:
    frames = traceback.extract_tb(error.__traceback__)
    if not frames or not frames[-1].filename.endswith(_VALIDATORS):
        raise error
    body = await request.json()  # it was read before, and is kept
    if not isinstance(body, Mapping):
        return _answer(*no_object(body))
    return _answer(f"the request body, or a field of it, has a value of a wrong type: {error}", None)


def _answer(message: str, param: str | None) -> JSONResponse:
    return JSONResponse({"error": wrong_value(message, param)}, 400)
