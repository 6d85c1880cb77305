"""Answers rows with an engine that is started when the first rows come, and again where it dies.

Rows that were in an engine when it died are asked again. Those that two engines have died with are asked one at a time,
so that a row which ends an engine is found, and gets that as its error.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

from sgl_batch.control_plane.data.engine_thread import EngineThread
from sgl_batch.control_plane.data.row_requests import RowAnswer, RowRequest
from sgl_batch.errors import EngineError

logger = logging.getLogger(__name__)

# Deaths after which rows are asked alone.
_TOGETHER = 2
# Deaths in a row, with no answer between them, after which the engine itself is at fault.
_MOST_DEATHS = 6


class RowEngine:
    """Answers rows on one event loop; any number of `answers` may be awaited at once. `close` ends it in any thread.

    `make` returns a new engine that has not started.
    """

    def __init__(self, make: Callable[[], EngineThread]) -> None:
        self._make = make
        self._engine: EngineThread | None = None
        self._starting = asyncio.Lock()
        self._turns = _Turns()
        self._deaths = 0

    async def answers(self, requests: Sequence[RowRequest]) -> list[RowAnswer]:
        """Return the answer to each request, in order.

        Raises:
            ConfigError: The engine cannot start with its arguments.
            EngineError: It does not start, or dies again and again.
        """
        answers: list[RowAnswer | None] = [None] * len(requests)
        for _ in range(_TOGETHER):
            left = [index for index, answer in enumerate(answers) if answer is None]
            if not left:
                break
            async with self._turns.together():
                found = await self._ask([requests[index] for index in left])
            for index, answer in zip(left, found, strict=True):
                answers[index] = answer
        return [
            answer if answer is not None else await self._answer_alone(requests[index])
            for index, answer in enumerate(answers)
        ]

    def close(self) -> None:
        """End the engine and its processes. Idempotent."""
        if self._engine is not None:
            self._engine.close()

    async def _answer_alone(self, request: RowRequest) -> RowAnswer:
        async with self._turns.alone():
            (answer,) = await self._ask([request])
            death = self._engine.death if self._engine is not None else None
        return answer or RowAnswer(error=f"the engine died when it answered this row alone: {death}")

    async def _ask(self, requests: Sequence[RowRequest]) -> list[RowAnswer | None]:
        if not requests:
            return []
        engine = await self._running()
        found = await engine.answers(requests)
        if any(answer is not None for answer in found):
            self._deaths = 0
        return found

    async def _running(self) -> EngineThread:
        """Return the engine, started; a new one where it has died."""
        async with self._starting:
            engine = self._engine
            if engine is not None and engine.death is not None:
                await self._bury(engine, engine.death)
                engine = None
            if engine is None:
                engine = self._engine = self._make()
                engine.start()
            await engine.ready()
            return engine

    async def _bury(self, engine: EngineThread, death: EngineError) -> None:
        """End what is left of a dead engine. Raises EngineError where another one would not help."""
        self._deaths += 1
        if death.code is not None or self._deaths >= _MOST_DEATHS:
            raise EngineError(f"the engine has died {self._deaths} times without an answer: {death}", code=death.code)
        logger.setLevel(logging.INFO)  # SGLang's level in this process is that of errors
        logger.warning("the engine died, and another one is started: %s", death)
        await asyncio.get_running_loop().run_in_executor(None, engine.close)
        self._engine = None


class _Turns:
    """Lets many hold it together, or one alone."""

    def __init__(self) -> None:
        self._changed = asyncio.Condition()
        self._holders = 0
        self._has_one_alone = False

    @asynccontextmanager
    async def together(self) -> AsyncIterator[None]:
        async with self._changed:
            await self._changed.wait_for(lambda: not self._has_one_alone)
            self._holders += 1
        try:
            yield
        finally:
            async with self._changed:
                self._holders -= 1
                self._changed.notify_all()

    @asynccontextmanager
    async def alone(self) -> AsyncIterator[None]:
        async with self._changed:
            await self._changed.wait_for(lambda: not self._has_one_alone and self._holders == 0)
            self._has_one_alone = True
        try:
            yield
        finally:
            async with self._changed:
                self._has_one_alone = False
                self._changed.notify_all()
