"""Owns the lines in flight on one engine, from its start to its death. The dispatcher decides which lines run."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from sgl_batch.core.answers import LineResponse
from sgl_batch.core.partial_output import PartialOutput
from sgl_batch.errors import EngineError
from sgl_batch.jobs.batch_service.active_job import ActiveJob
from sgl_batch.jobs.batch_service.engine_shares import EngineShares
from sgl_batch.jobs.line_engine import LineEngine
from sgl_batch.jobs.request_line import RequestLine
from sgl_batch.jobs.result_lines import internal_error_response, result_token

logger = logging.getLogger(__name__)

CANCEL_WAIT_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LineInFlight:
    """A line with its job and its partial output."""

    job: ActiveJob
    line: RequestLine
    partial_output: PartialOutput


class EngineSession:
    """The lines that one engine has.

    `shares` accounts for the time of lines in the engine. `on_answer` gets each answer. `on_dropped` gets each line
    that leaves the engine without an answer.
    """

    def __init__(
        self,
        engine: LineEngine,
        shares: EngineShares,
        on_answer: Callable[[LineInFlight, LineResponse], None],
        on_dropped: Callable[[LineInFlight], None],
    ) -> None:
        self.engine = engine
        self.death: EngineError | None = None
        self._shares = shares
        self._on_answer = on_answer
        self._on_dropped = on_dropped
        self._tasks: dict[asyncio.Task[LineResponse], LineInFlight] = {}
        self._suspects: list[LineInFlight] = []

    @property
    def num_in_flight(self) -> int:
        """How many lines the engine has not answered."""
        return len(self._tasks)

    def start(self, one: LineInFlight) -> None:
        """Give a line to the engine."""
        task = asyncio.ensure_future(self.engine.respond(one.line.url, one.line.body, one.partial_output))
        self._tasks[task] = one
        self._shares.enter(one.job.engine_share)
        task.add_done_callback(partial(self._ended, one))

    async def drop(self, job: ActiveJob) -> None:
        """Abort the lines of a job that takes no more results."""
        await self._cancel([task for task, one in self._tasks.items() if one.job is job])

    async def close(self) -> None:
        """Abort everything in flight. No job takes results any more."""
        await self._cancel(list(self._tasks))

    async def take_suspects(self) -> list[LineInFlight]:
        """Return, after the death, the lines that were in flight without an answer, once none is in flight."""
        if self._tasks:
            await asyncio.wait(list(self._tasks), timeout=CANCEL_WAIT_S)
        await self._cancel(list(self._tasks))
        suspects, self._suspects = self._suspects, []
        return [one for one in suspects if one.job.accepts_results]

    async def _cancel(self, tasks: list[asyncio.Task[LineResponse]]) -> None:
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=CANCEL_WAIT_S)

    def _ended(self, one: LineInFlight, task: asyncio.Task[LineResponse]) -> None:
        del self._tasks[task]
        self._shares.leave(one.job.engine_share)
        error = None if task.cancelled() else task.exception()
        if isinstance(error, EngineError) and self.death is None:
            self.death = error
            logger.error("the engine died with %d lines in flight: %s", len(self._tasks) + 1, error)
        if not one.job.accepts_results:
            self._on_dropped(one)
        elif isinstance(error, EngineError) or (task.cancelled() and self.death is not None):
            self._suspects.append(one)
            self._on_dropped(one)
        elif task.cancelled():
            self._on_answer(one, self._failed(one, asyncio.CancelledError("cancelled inside the engine")))
        elif error is not None:
            # A fault of the program with this line: it fails, and the other lines go on.
            logger.error("line %d of %s: the engine raised", one.line.number, one.job.id, exc_info=error)
            self._on_answer(one, self._failed(one, error))
        else:
            self._on_answer(one, task.result())

    def _failed(self, one: LineInFlight, error: BaseException) -> LineResponse:
        return internal_error_response(result_token(one.job.id, one.line.index), error)
