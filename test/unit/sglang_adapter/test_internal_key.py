"""The HTTP endpoints of an engine's process answer its front only."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from sgl_batch.sglang_adapter.internal_key import OnlyWithKey

RIGHT = (b"authorization", b"Bearer k")


def ask(kind: str, *headers: tuple[bytes, bytes], method: str = "GET") -> list[Any]:
    """Return the messages that an app behind the key sends."""
    sent: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        sent.append("let in")

    async def send(message: Any) -> None:
        sent.append(message.get("status", message["type"]))

    scope = {"type": kind, "path": "/health_generate", "method": method, "headers": list(headers)}
    asyncio.run(OnlyWithKey(app, "k")(scope, None, send))
    return sent


@pytest.mark.parametrize(
    "headers", [(), ((b"authorization", b"Bearer x"),), ((b"authorization", b"k"),), (RIGHT, RIGHT)]
)
@pytest.mark.parametrize("method", ["GET", "OPTIONS"])
def test_without_the_key_nothing_is_answered(headers: tuple[tuple[bytes, bytes], ...], method: str) -> None:
    assert ask("http", *headers, method=method) == [401, "http.response.body"]
    assert ask("websocket", *headers) == ["websocket.close"]


def test_requests_with_the_key_and_messages_without_a_client_pass() -> None:
    assert ask("http", RIGHT) == ask("websocket", RIGHT) == ask("lifespan") == ["let in"]
