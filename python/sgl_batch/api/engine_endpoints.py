"""Owns the way to SGLang's endpoints of one engine: a Protocol, and its form for an engine on this machine."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Protocol

import aiohttp
from yarl import URL

from sgl_batch.engine.engine_process import EngineHttp
from sgl_batch.errors import SglBatchError

RawHeaders = Sequence[tuple[bytes, bytes]]

_CONNECT_WITHIN_S = 10.0


class EndpointsGoneError(SglBatchError):
    """The engine does not answer, or went away during a request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A request. `target`: its path and query, as they were sent. `body`: None without one.

    The headers have no key, and nothing that is of one connection only.
    """

    method: str
    target: str
    headers: RawHeaders = ()
    body: AsyncIterator[bytes] | bytes | None = None


class Answer(Protocol):
    """An answer whose body comes in chunks. Headers are as the engine sent them."""

    @property
    def status(self) -> int:
        """HTTP's status."""
        ...

    @property
    def headers(self) -> RawHeaders:
        """HTTP's headers."""
        ...

    def chunks(self) -> AsyncIterator[bytes]:
        """Return the body, once. Raises EndpointsGoneError where its end does not come."""
        ...


class Endpoints(Protocol):
    """SGLang's endpoints of one engine."""

    def request(self, asked: Asked) -> AbstractAsyncContextManager[Answer]:
        """Send a request, and wait for the head of its answer. Leaving the context early aborts the request.

        Raises EndpointsGoneError.
        """
        ...


def header(headers: RawHeaders, name: bytes) -> str | None:
    """Return the value of a header, or None. `name` is in lower case."""
    return next((value.decode("latin-1") for one, value in headers if one.lower() == name), None)


def media_type(headers: RawHeaders) -> str:
    """Return the media type of a body, without parameters."""
    return (header(headers, b"content-type") or "").partition(";")[0].strip().lower()


@dataclass(frozen=True, slots=True)
class _LoopbackAnswer:
    answer: aiohttp.ClientResponse

    @property
    def status(self) -> int:
        return self.answer.status

    @property
    def headers(self) -> RawHeaders:
        return self.answer.raw_headers

    async def chunks(self) -> AsyncIterator[bytes]:
        try:
            async for chunk in self.answer.content.iter_any():
                yield chunk
        except aiohttp.ClientError as error:
            raise EndpointsGoneError(_in_words(error)) from error


class LoopbackEndpoints:
    """The endpoints of an engine on this machine. The key is added here, and stays on this machine."""

    def __init__(self, http: EngineHttp) -> None:
        self._http = http
        self._session: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        """Give up the requests in progress."""
        if self._session is not None:
            await self._session.close()

    def _client(self) -> aiohttp.ClientSession:
        """Return the HTTP client. Each request has its own connection: a kept one may close as it is used again."""
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, force_close=True),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_WITHIN_S),
                auto_decompress=False,
                skip_auto_headers=("Accept-Encoding", "User-Agent", "Content-Type"),
            )
        return self._session

    @asynccontextmanager
    async def request(self, asked: Asked) -> AsyncIterator[Answer]:
        """Send a request."""
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in asked.headers}
        headers["Authorization"] = f"Bearer {self._http.api_key}"
        try:
            answer = await self._client().request(
                asked.method,
                URL(self._http.base_url + asked.target, encoded=True),
                headers=headers,
                data=asked.body,
                allow_redirects=False,
            )
        except aiohttp.ClientError as error:
            raise EndpointsGoneError(_in_words(error)) from error
        async with answer:
            yield _LoopbackAnswer(answer)


def _in_words(error: Exception) -> str:
    return str(error) or type(error).__name__
