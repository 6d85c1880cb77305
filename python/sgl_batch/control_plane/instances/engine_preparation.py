"""Brings each engine of one instance to the state of the service before it takes lines, and controls it."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable
from typing import Protocol

from sgl_batch.api.engine_endpoints import Asked, Endpoints, EndpointsGoneError, media_type
from sgl_batch.control_plane.instances.engine_lines import PackedEngine
from sgl_batch.control_plane.instances.http_messages import Control, Controlled
from sgl_batch.control_plane.instances.messages import OUTDATED, UPDATING
from sgl_batch.control_plane.instances.service_state import NotRepeatableError, ServiceState, gained, missing

logger = logging.getLogger(__name__)

_NEW_ENGINE = ServiceState()
_KEPT_ANSWERS = 16
_JSON = ((b"content-type", b"application/json"),)


class EngineSource(Protocol):
    """What keeps an engine running."""

    def current(self) -> PackedEngine | None:
        """Return the engine that is ready now, or None."""
        ...

    def endpoints(self) -> Endpoints | None:
        """Return SGLang's endpoints of the ready engine, or None."""
        ...


class PreparedEngine:
    """The engine of an instance, as far as it has the state of the service.

    All methods are called on one event loop.

    Args:
        source: Keeps the engine running.
        on_news: Called when `phase` may have changed.
    """

    def __init__(self, source: EngineSource, on_news: Callable[[], None]) -> None:
        self._source, self._on_news = source, on_news
        self._wanted = _NEW_ENGINE
        self._engine: PackedEngine | None = None
        self._has = _NEW_ENGINE
        self._fault: str | None = None
        self._preparing: asyncio.Task[None] | None = None
        self._controlled: dict[str, asyncio.Task[Controlled]] = {}

    def current(self) -> PackedEngine | None:
        """Return the ready engine if it has the state of the service. Else begin to bring a new one to it."""
        engine = self._source.current()
        if engine is not None and engine is not self._engine and self._preparing is None:
            self._engine, self._has, self._fault = engine, _NEW_ENGINE, None
            self._prepare()
        is_prepared = engine is self._engine and self._preparing is None and self._fault is None
        return engine if is_prepared else None

    @property
    def phase(self) -> tuple[str, str | None] | None:
        """What a ready engine does instead of taking lines, and why; None where it takes them."""
        if self._source.current() is None or self.current() is not None:
            return None
        return (UPDATING, "it is brought to the state of the service") if self._preparing else (OUTDATED, self._fault)

    def adopt(self, state: ServiceState) -> None:
        """Make this the state that the engine must have, now and after its death."""
        self._wanted = state
        if self._engine is not None and self._engine is self._source.current() and self._preparing is None:
            self._fault = None
            self._prepare()

    async def control(self, asked: Control) -> Controlled:
        """Send a request to the engine. One that is sent again is not repeated."""
        name = asked.request.call
        if name not in self._controlled:
            while len(self._controlled) >= _KEPT_ANSWERS:
                del self._controlled[next(iter(self._controlled))]
            self._controlled[name] = asyncio.create_task(self._control(asked))
        return await asyncio.shield(self._controlled[name])

    def close(self) -> None:
        """Bring no engine to any state any more."""
        if self._preparing is not None:
            self._preparing.cancel()

    def _prepare(self) -> None:
        """Send the engine what it lacks, at once if that is nothing."""
        if self._has != self._wanted:
            self._preparing = asyncio.create_task(self._send_missing(self._engine))
            self._preparing.add_done_callback(self._prepared)

    def _prepared(self, task: asyncio.Task[None]) -> None:
        self._preparing = None
        if not task.cancelled() and task.exception() is not None:
            self._fault = f"it could not be brought to the state of the service: {task.exception()}"
            logger.error("%s", self._fault)
        self._on_news()

    async def _send_missing(self, engine: PackedEngine | None) -> None:
        while self._has != self._wanted and self._source.current() is engine:
            wanted = self._wanted
            for path, body in missing(self._has, wanted):
                asked = Asked(method="POST", target=path, headers=_JSON, body=body)
                answer = await self._ask(asked)
                if answer.status != 200:
                    raise NotRepeatableError(f"{path}: {answer.body.decode(errors='replace')}")
            self._has = wanted

    async def _control(self, control: Control) -> Controlled:
        request, before, after = control.request, control.before, control.after
        engine = self._source.current()
        if after is not None:
            self._wanted = after
        self.current()
        if engine is None or self._preparing is not None:
            return Controlled(status=0, body=b"it is not ready; it gets the state of the service before it takes lines")
        asked = Asked(method=request.method, target=request.target, headers=request.headers, body=request.body)
        answer = await self._ask(asked)
        if before is not None and after is not None and engine is self._engine:
            path = request.target.partition("?")[0]
            if answer.status == 200:
                self._has = gained(self._has, path, before, after)
            if self._has == self._wanted:
                self._fault = None
            elif answer.status != 200:
                self._fault = f"{path}: {answer.body.decode(errors='replace')}"
            self._on_news()
        return Controlled(
            status=answer.status,
            content_type=answer.content_type,
            body=answer.body,
            weight_version=await self._weight_version(),
        )

    async def _ask(self, asked: Asked) -> Controlled:
        """Return the answer of the engine, whole; with status 502 where it goes away."""
        endpoints = self._source.endpoints()
        try:
            if endpoints is None:
                raise EndpointsGoneError("its engine has ended")
            async with endpoints.request(asked) as answer:
                body = b"".join([chunk async for chunk in answer.chunks()])
                return Controlled(status=answer.status, content_type=media_type(answer.headers), body=body)
        except EndpointsGoneError as error:
            return Controlled(status=502, body=str(error).encode())

    async def _weight_version(self) -> str | None:
        answer = await self._ask(Asked(method="GET", target="/model_info"))
        found = json.loads(answer.body).get("weight_version") if answer.status == 200 else None
        return None if found is None else str(found)
