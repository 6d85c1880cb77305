"""Passes all other requests on to SGLang's endpoints in the engine's process, and their answers back.

Both are streams. When the client goes away, the request to the engine is given up too, so that the engine aborts it.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable
from typing import Any

from starlette.types import Message, Receive, Scope, Send

from sgl_batch.api.auth import is_for_admin
from sgl_batch.api.engine_answers import as_openai_error, without_secrets
from sgl_batch.api.engine_endpoints import Answer, Asked, Endpoints, EndpointsGoneError, header, media_type
from sgl_batch.api.engine_keeper import EnginesControl
from sgl_batch.api.errors import error_body, error_response
from sgl_batch.api.supervisor import EngineState

logger = logging.getLogger(__name__)

_HOP_BY_HOP = frozenset(
    b"connection keep-alive proxy-authenticate proxy-authorization te trailer transfer-encoding upgrade".split()
)
_NOT_ASKED = _HOP_BY_HOP | {b"host", b"authorization", b"expect", b"origin"}
_NOT_ANSWERED = _HOP_BY_HOP | {b"server", b"date"}
_CROSS_ORIGIN = b"access-control-"
_SECRET_PATHS = frozenset({"/server_info", "/get_server_info"})
_MAX_CHANGED_BYTES = 16 << 20
_RETRY_AFTER_S = 5


class ClientGoneError(Exception):
    """The client has closed its connection."""


class PassThrough:
    """An ASGI app over the engine that runs now.

    `endpoints` returns those of the engine that gets the next request, and `state` says why there are none. `control`:
    with several engines, it takes the requests that control an engine, because they are for all of them.
    """

    def __init__(
        self,
        endpoints: Callable[[], Endpoints | None],
        state: Callable[[], EngineState],
        control: EnginesControl | None = None,
    ) -> None:
        self._endpoints, self._state, self._control = endpoints, state, control

    async def fetch(self, path: str, timeout_s: float) -> bytes | None:
        """Return the engine's answer to a GET, or None unless it is a 200 in time."""
        endpoints = self._endpoints()
        if endpoints is None:
            return None
        try:
            async with asyncio.timeout(timeout_s), endpoints.request(Asked(method="GET", target=path)) as answer:
                return b"".join([chunk async for chunk in answer.chunks()]) if answer.status == 200 else None
        except (EndpointsGoneError, TimeoutError):
            return None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1003})
            return
        exchange = _Exchange(scope, receive, send)
        try:
            if self._control is not None and is_for_admin(scope["path"]):
                response = await self._control.control(scope["path"], exchange.asked())
                await response(scope, receive, send)
            elif (endpoints := self._endpoints()) is not None:
                await exchange.run(endpoints)
            else:
                await self._absent(scope, receive, send)
        except ClientGoneError:
            return
        except EndpointsGoneError as error:
            await exchange.break_off(f"the engine did not answer: {error}")

    async def _absent(self, scope: Scope, receive: Receive, send: Send) -> None:
        state = self._state()
        message = f"the engine is {state.phase}" + (f": {state.message}" if state.message else "")
        headers = {} if state.phase == "failed" else {"Retry-After": str(_RETRY_AFTER_S)}
        await error_response(503, message, code="engine_unavailable", headers=headers)(scope, receive, send)


class _Exchange:
    """One request to the engine, and its answer."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._scope, self._receive, self._send = scope, receive, send
        self._asked = asyncio.Event()
        self._begun_as: str | None = None

    async def run(self, endpoints: Endpoints) -> None:
        """Run the exchange. Raises ClientGoneError, or EndpointsGoneError for the engine's side."""
        working = asyncio.ensure_future(self._work(endpoints))
        watching = asyncio.ensure_future(self._client_goes())
        try:
            await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                raise ClientGoneError
            working.result()
        finally:
            for task in (working, watching):
                task.cancel()
            await asyncio.gather(working, watching, return_exceptions=True)

    async def _client_goes(self) -> None:
        await self._asked.wait()
        while (await self._receive())["type"] != "http.disconnect":
            pass

    async def _body(self) -> AsyncIterator[bytes]:
        while True:
            message: Message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientGoneError
            if message.get("body"):
                yield message["body"]
            if not message.get("more_body"):
                self._asked.set()
                return

    def asked(self) -> Asked:
        """Return the request as the engine gets it. Its body is read once, and raises ClientGoneError."""
        scope = self._scope
        has_body = any(name in (b"content-length", b"transfer-encoding") for name, _ in scope["headers"])
        if not has_body:
            self._asked.set()
        query = scope["query_string"]
        return Asked(
            method=scope["method"],
            target=(scope["raw_path"] + (b"?" + query if query else b"")).decode("latin-1"),
            headers=tuple((name, value) for name, value in scope["headers"] if name not in _NOT_ASKED),
            body=self._body() if has_body else None,
        )

    async def _work(self, endpoints: Endpoints) -> None:
        async with endpoints.request(self.asked()) as answer:
            await self._answer(answer)

    async def _answer(self, answer: Answer) -> None:
        change = self._change(answer)
        if change is not None and int(header(answer.headers, b"content-length") or 0) <= _MAX_CHANGED_BYTES:
            body = b"".join([chunk async for chunk in answer.chunks()])
            content = json.dumps(change(json.loads(body))).encode()
            await self._begin(answer, length=len(content))
            await self._send({"type": "http.response.body", "body": content})
            return
        await self._begin(answer)
        async for chunk in answer.chunks():
            await self._send({"type": "http.response.body", "body": chunk, "more_body": True})
        await self._send({"type": "http.response.body", "body": b""})

    def _change(self, answer: Answer) -> Callable[[Any], Any] | None:
        """Return the change that an answer needs, or None where it goes through unchanged."""
        if media_type(answer.headers) != "application/json" or header(answer.headers, b"content-encoding"):
            return None
        if self._scope["path"] in _SECRET_PATHS:
            return without_secrets
        if answer.status >= 400 and self._scope["path"].startswith("/v1/"):
            asked = f"{self._scope['method']} {self._scope['path']}"
            return lambda content: as_openai_error(answer.status, content, asked)
        return None

    async def _begin(self, answer: Answer, length: int | None = None) -> None:
        headers = [
            (name.lower(), value)
            for name, value in answer.headers
            if name.lower() not in _NOT_ANSWERED and not name.lower().startswith(_CROSS_ORIGIN)
        ]
        if length is not None:
            headers = [(name, value) for name, value in headers if name != b"content-length"]
            headers.append((b"content-length", str(length).encode()))
        self._begun_as = media_type(answer.headers)
        await self._send({"type": "http.response.start", "status": answer.status, "headers": headers})

    async def break_off(self, message: str) -> None:
        """Report to the client that the engine went away during the request.

        An answer that has begun, and is not a stream of events, stays without its end: clients see that as an error.
        """
        logger.warning("%s %s: %s", self._scope["method"], self._scope["path"], message)
        if self._begun_as is None:
            await error_response(502, message, code="engine_gone")(self._scope, self._receive, self._send)
        elif self._begun_as == "text/event-stream":
            event = f"data: {json.dumps(error_body(502, message, code='engine_gone'))}\n\n".encode()
            await self._send({"type": "http.response.body", "body": event})
