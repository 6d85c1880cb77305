"""Owns that SGLang's HTTP endpoints in an engine's process answer to its front alone, all of them.

SGLang's own check of keys leaves whatever begins with /health or /metrics open, and requests by OPTIONS. What users may
ask for is the front's to decide.
"""

from __future__ import annotations

import secrets
from typing import Any

_UNAUTHORIZED = 401


class OnlyWithKey:
    """An ASGI app that lets those through to `app` who have `key`."""

    def __init__(self, app: Any, key: str) -> None:
        self._app, self._wanted = app, f"Bearer {key}".encode()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] not in ("http", "websocket") or self._is_let_in(scope["headers"]):
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            await send({"type": "http.response.start", "status": _UNAUTHORIZED, "headers": [(b"content-length", b"0")]})
            await send({"type": "http.response.body", "body": b""})

    def _is_let_in(self, headers: list[tuple[bytes, bytes]]) -> bool:
        given = [value for name, value in headers if name == b"authorization"]
        return len(given) == 1 and secrets.compare_digest(given[0], self._wanted)
