"""Owns the key check of SGLang's HTTP endpoints in an engine's process: all of them answer the front process only.

SGLang's own key check leaves paths that begin with /health or /metrics open, and OPTIONS requests. The front decides
what users may request.
"""

from __future__ import annotations

import secrets
from typing import Any

_UNAUTHORIZED = 401


class OnlyWithKey:
    """An ASGI app that passes requests with `key` to `app`, and answers 401 to others."""

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
