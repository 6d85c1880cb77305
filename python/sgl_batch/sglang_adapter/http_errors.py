"""Adapts SGLang's HTTP server to answer 400 to bodies on which its validators fail with a type error.

SGLang answers them with 500, although they are the client's fault. Other errors stay as they are.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse

_VALIDATORS = "/entrypoints/openai/protocol.py"


def refuse_unexpected_types(app: Any) -> Callable[[], None]:
    """Let an app answer 400 to values of types that its validators do not expect; return a function that undoes it."""
    before = dict(app.exception_handlers)
    for kind in (AttributeError, TypeError):
        app.add_exception_handler(kind, _refuse)

    def undo() -> None:
        app.exception_handlers.clear()
        app.exception_handlers.update(before)

    return undo


def _refuse(_: Request, error: Exception) -> JSONResponse:
    frames = traceback.extract_tb(error.__traceback__)
    if not frames or not frames[-1].filename.endswith(_VALIDATORS):
        raise error
    message = f"the request body, or a field of it, has a value of a wrong type: {error}"
    return JSONResponse({"object": "error", "message": message, "type": "BadRequestError", "code": 400}, 400)
