"""Owns the requests that the server sends to SGLang's endpoints of an instance: answers wait here, part by part.

A request whose parts are not asked for any more is aborted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

from sgl_batch.api.engine_endpoints import Asked, Endpoints, EndpointsGoneError
from sgl_batch.control_plane.instances.http_messages import Headers, HttpMore, HttpPart, HttpRequest

PART_WITHIN_S = 5.0
"""A part comes after so many seconds at the latest; it may be empty."""

_HELD_BYTES = 1 << 20
_ABANDONED_AFTER_S = 60.0


class HttpCalls:
    """The requests in progress. All methods are called on one event loop.

    Args:
        endpoints: Returns those of the ready engine, or None.
        abandoned_after_s: A request is aborted when no part of its answer was asked for in so many seconds.
        part_within_s: See PART_WITHIN_S.
    """

    def __init__(
        self,
        endpoints: Callable[[], Endpoints | None],
        *,
        abandoned_after_s: float = _ABANDONED_AFTER_S,
        part_within_s: float = PART_WITHIN_S,
    ) -> None:
        self._endpoints = endpoints
        self._abandoned_after_s, self._part_within_s = abandoned_after_s, part_within_s
        self._calls: dict[str, _Call] = {}

    def __len__(self) -> int:
        return len(self._calls)

    async def begin(self, request: HttpRequest) -> HttpPart:
        """Send a request, if it is not sent yet, and return the first part of its answer."""
        if request.call not in self._calls:
            endpoints = self._endpoints()
            if endpoints is None:
                return HttpPart(1, is_last=True, fault="no engine is ready")
            self._calls[request.call] = _Call(endpoints, request, self._part_within_s)
        return await self.more(HttpMore(request.call, 1))

    async def more(self, asked: HttpMore) -> HttpPart:
        """Return a part of an answer."""
        call = self._calls.get(asked.call)
        if call is None:
            return HttpPart(asked.number, is_last=True, fault="the request was aborted")
        if call.timer is not None:
            call.timer.cancel()
        part = await call.part(asked.number)
        loop = asyncio.get_running_loop()
        call.timer = loop.call_later(self._abandoned_after_s, self.end, asked.call)
        return part

    def end(self, name: str) -> None:
        """Abort a request whose answer is not wanted any more, or forget an ended one. Idempotent."""
        call = self._calls.pop(name, None)
        if call is not None:
            call.end()


class _Call:
    """One request."""

    def __init__(self, endpoints: Endpoints, request: HttpRequest, part_within_s: float) -> None:
        self._endpoints, self._request = endpoints, request
        self._part_within_s = part_within_s
        self._status = 0
        self._headers: Headers = ()
        self._data = bytearray()
        self._fault: str | None = None
        self._is_done = False
        self._last = HttpPart(0)
        self._one_at_a_time = asyncio.Lock()
        self._news, self._room = asyncio.Event(), asyncio.Event()
        self.timer: asyncio.TimerHandle | None = None
        self._task = asyncio.create_task(self._run())

    async def part(self, number: int) -> HttpPart:
        """Return the part of this number: the last one again, or the next one."""
        async with self._one_at_a_time:
            if number > self._last.number:
                with suppress(TimeoutError):
                    async with asyncio.timeout(self._part_within_s):
                        await self._news.wait()
                self._last = self._take(number)
            return self._last

    def end(self) -> None:
        """Abort it."""
        self._task.cancel()
        if self.timer is not None:
            self.timer.cancel()

    def _take(self, number: int) -> HttpPart:
        data = bytes(self._data)
        self._data.clear()
        if not self._is_done:
            self._news.clear()
        self._room.set()
        return HttpPart(number, self._status, self._headers, data, self._is_done, self._fault)

    async def _run(self) -> None:
        request = self._request
        asked = Asked(method=request.method, target=request.target, headers=request.headers, body=request.body)
        try:
            async with self._endpoints.request(asked) as answer:
                self._status, self._headers = answer.status, tuple(answer.headers)
                self._news.set()
                async for chunk in answer.chunks():
                    self._data += chunk
                    self._news.set()
                    while len(self._data) >= _HELD_BYTES:
                        self._room.clear()
                        await self._room.wait()
        except EndpointsGoneError as error:
            self._fault = str(error)
        finally:
            self._is_done = True
            self._news.set()
