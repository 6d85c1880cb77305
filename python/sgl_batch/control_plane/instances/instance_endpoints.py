"""SGLang's endpoints of the instances, for requests that one of them answers: it is chosen here."""

from __future__ import annotations

import asyncio
import itertools
import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from sgl_batch.api.engine_endpoints import Answer, Asked, EndpointsGoneError, RawHeaders
from sgl_batch.control_plane.instances.http_messages import MAX_BODY_BYTES, Headers, HttpMore, HttpPart, HttpRequest
from sgl_batch.control_plane.instances.member import Member, MemberLostError
from sgl_batch.errors import RequestError

_MOST_AT_ONCE = 512  # requests of one instance; each holds a call of its actor, and further ones wait


@dataclass(slots=True, eq=False)
class _Load:
    """`asking`: requests that an instance has. `turn`: when it was chosen last."""

    asking: int = 0
    turn: int = 0
    room: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(_MOST_AT_ONCE))


class InstanceEndpoints:
    """Chooses an instance for each request. `loads` returns the ready ones, and how many lines each has."""

    def __init__(self, loads: Callable[[], list[tuple[Member, int]]]) -> None:
        self._ready = loads
        self._loads: WeakKeyDictionary[Member, _Load] = WeakKeyDictionary()
        self._turns = itertools.count(1)
        self._ending: set[asyncio.Task[None]] = set()

    def choose(self) -> MemberEndpoints | None:
        """Return the endpoints of the ready instance with the fewest lines and requests; in turn where they are equal.

        None while none is ready.
        """
        found = [(lines, member, self._loads.setdefault(member, _Load())) for member, lines in self._ready()]
        if not found:
            return None
        _, member, load = min(found, key=lambda one: (one[0] + one[2].asking, one[2].turn))
        load.turn = next(self._turns)
        return MemberEndpoints(member, load, self._ending)


class MemberEndpoints:
    """The endpoints of one instance, which are reached through its member. `ending` holds what ends requests."""

    def __init__(self, member: Member, load: _Load, ending: set[asyncio.Task[None]]) -> None:
        self._member, self._load, self._ending = member, load, ending

    @asynccontextmanager
    async def request(self, asked: Asked) -> AsyncIterator[Answer]:
        """Send a request. Raises RequestError for a body that is too long."""
        self._load.asking += 1
        try:
            request = await whole(asked)
            async with self._load.room:
                answer = _MemberAnswer(self._member, request.call)
                try:
                    await answer.begin(request)
                    yield answer
                finally:
                    task = asyncio.create_task(self._end(request.call))
                    self._ending.add(task)
                    task.add_done_callback(self._ending.discard)
        except MemberLostError as error:
            raise EndpointsGoneError(str(error)) from error
        finally:
            self._load.asking -= 1

    async def _end(self, call: str) -> None:
        with suppress(MemberLostError):  # then the request has ended with it
            await self._member.http_end(call)


class _MemberAnswer:
    """An answer that is asked for part by part."""

    def __init__(self, member: Member, call: str) -> None:
        self._member, self._call = member, call
        self._part = HttpPart(0)

    @property
    def status(self) -> int:
        return self._part.status

    @property
    def headers(self) -> RawHeaders:
        return self._part.headers

    async def begin(self, request: HttpRequest) -> None:
        """Send the request, and wait for the head of the answer."""
        self._part = await self._member.http(request)
        while not self._part.status:
            self._raise_fault()
            await self._next()

    async def chunks(self) -> AsyncIterator[bytes]:
        """Return the body."""
        while True:
            if self._part.data:
                yield self._part.data
            self._raise_fault()
            if self._part.is_last:
                return
            await self._next()

    async def _next(self) -> None:
        self._part = await self._member.http_more(HttpMore(self._call, self._part.number + 1))

    def _raise_fault(self) -> None:
        if self._part.fault is not None:
            raise EndpointsGoneError(self._part.fault)


async def whole(asked: Asked) -> HttpRequest:
    """Return the message of a request, once its body is there. Raises RequestError (413)."""
    headers: Headers = tuple(asked.headers)
    body = asked.body
    if body is not None and not isinstance(body, bytes):
        held = bytearray()
        async for chunk in body:
            held += chunk
            if len(held) > MAX_BODY_BYTES:
                message = (
                    f"with instances, the body of a request has at most {MAX_BODY_BYTES:,} bytes: send less at once"
                )
                raise RequestError(code="request_too_large", message=message, status_code=413)
        body = bytes(held)
    return HttpRequest(secrets.token_hex(12), asked.method, asked.target, headers, body)
