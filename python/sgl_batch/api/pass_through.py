"""Passes all other requests on to SGLang's endpoints in the engine's process, and their answers back.

Both are streams. When the client goes away, the request to the engine is given up too, so that the engine aborts it.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable
from typing import Any

import aiohttp
from starlette.types import Message, Receive, Scope, Send
from yarl import URL

from sgl_batch.api.auth import is_for_admin
from sgl_batch.api.engine_answers import as_openai_error, without_secrets
from sgl_batch.api.errors import error_body, error_response
from sgl_batch.api.supervisor import EngineState
from sgl_batch.engine.engine_process import EngineHttp

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

    `http` returns its address, and `state` says why there is none. `num_engines`: with several engines, requests that
    control an engine are refused, because they would reach one of them only.
    """

    def __init__(
        self,
        http: Callable[[], EngineHttp | None],
        state: Callable[[], EngineState],
        num_engines: Callable[[], int] = lambda: 1,
    ) -> None:
        self._http, self._state, self._num_engines = http, state, num_engines
        self._session: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        """Give up the requests in progress."""
        if self._session is not None:
            await self._session.close()

    async def fetch(self, path: str, timeout_s: float) -> bytes | None:
        """Return the engine's answer to a GET, or None unless it is a 200 in time."""
        http = self._http()
        if http is None:
            return None
        try:
            timeout = aiohttp.ClientTimeout(total=timeout_s)
            headers = {"Authorization": f"Bearer {http.api_key}"}
            async with self._client().get(http.base_url + path, headers=headers, timeout=timeout) as answer:
                return await answer.read() if answer.status == 200 else None
        except (aiohttp.ClientError, TimeoutError):
            return None

    def _client(self) -> aiohttp.ClientSession:
        """Return the HTTP client. Each request has its own connection: a kept one may close as it is used again."""
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, force_close=True),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=10),
                auto_decompress=False,
                skip_auto_headers=("Accept-Encoding", "User-Agent", "Content-Type"),
            )
        return self._session

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1003})
            return
        if self._num_engines() > 1 and is_for_admin(scope["path"]):
            message = f"{scope['path']} would control one of {self._num_engines()} instances only, and is not answered"
            await error_response(501, message, code="many_instances")(scope, receive, send)
            return
        http = self._http()
        if http is None:
            await self._absent(scope, receive, send)
            return
        exchange = _Exchange(self._client(), http, scope, receive, send)
        try:
            await exchange.run()
        except ClientGoneError:
            return
        except aiohttp.ClientError as error:
            await exchange.break_off(f"the engine did not answer: {error or type(error).__name__}")

    async def _absent(self, scope: Scope, receive: Receive, send: Send) -> None:
        state = self._state()
        message = f"the engine is {state.phase}" + (f": {state.message}" if state.message else "")
        if state.phase == "ready":
            message = (
                "no ready instance runs on the server's own machine, and only such a one answers SGLang's endpoints"
            )
        headers = {} if state.phase == "failed" else {"Retry-After": str(_RETRY_AFTER_S)}
        await error_response(503, message, code="engine_unavailable", headers=headers)(scope, receive, send)


class _Exchange:
    """One request to the engine, and its answer."""

    def __init__(
        self, client: aiohttp.ClientSession, http: EngineHttp, scope: Scope, receive: Receive, send: Send
    ) -> None:
        self._client, self._http = client, http
        self._scope, self._receive, self._send = scope, receive, send
        self._asked = asyncio.Event()
        self._begun_as: str | None = None

    async def run(self) -> None:
        """Run the exchange. Raises ClientGoneError, or aiohttp's errors for the engine's side."""
        working = asyncio.ensure_future(self._work())
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

    async def _work(self) -> None:
        scope = self._scope
        headers = [(name, value) for name, value in scope["headers"] if name not in _NOT_ASKED]
        has_body = any(name in (b"content-length", b"transfer-encoding") for name, _ in scope["headers"])
        if not has_body:
            self._asked.set()
        query = scope["query_string"]
        target = scope["raw_path"] + (b"?" + query if query else b"")
        asked = {name.decode("latin-1"): value.decode("latin-1") for name, value in headers}
        asked["Authorization"] = f"Bearer {self._http.api_key}"
        async with self._client.request(
            scope["method"],
            URL(self._http.base_url + target.decode("latin-1"), encoded=True),
            headers=asked,
            data=self._body() if has_body else None,
            allow_redirects=False,
        ) as answer:
            await self._answer(answer)

    async def _answer(self, answer: aiohttp.ClientResponse) -> None:
        change = self._change(answer)
        if change is not None and (answer.content_length or 0) <= _MAX_CHANGED_BYTES:
            content = json.dumps(change(json.loads(await answer.read()))).encode()
            await self._begin(answer, length=len(content))
            await self._send({"type": "http.response.body", "body": content})
            return
        await self._begin(answer)
        async for chunk in answer.content.iter_any():
            await self._send({"type": "http.response.body", "body": chunk, "more_body": True})
        await self._send({"type": "http.response.body", "body": b""})

    def _change(self, answer: aiohttp.ClientResponse) -> Callable[[Any], Any] | None:
        """Return the change that an answer needs, or None where it goes through unchanged."""
        if answer.content_type != "application/json" or answer.headers.get("Content-Encoding"):
            return None
        if self._scope["path"] in _SECRET_PATHS:
            return without_secrets
        if answer.status >= 400 and self._scope["path"].startswith("/v1/"):
            return lambda content: as_openai_error(answer.status, content)
        return None

    async def _begin(self, answer: aiohttp.ClientResponse, length: int | None = None) -> None:
        headers = [
            (name.lower(), value)
            for name, value in answer.raw_headers
            if name.lower() not in _NOT_ANSWERED and not name.lower().startswith(_CROSS_ORIGIN)
        ]
        if length is not None:
            headers = [(name, value) for name, value in headers if name != b"content-length"]
            headers.append((b"content-length", str(length).encode()))
        self._begun_as = answer.content_type
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
