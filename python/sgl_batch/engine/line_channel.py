"""Owns how request lines reach an engine in another process over one connection, and how their answers come back.

`LineClient` stands for the engine where lines are asked, `serve_lines` answers them where the engine is. Neither knows
jobs, or why a process starts and ends.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from functools import partial
from typing import Any, NoReturn, Protocol

from sgl_batch.core.answers import EngineStats, LineResponse
from sgl_batch.core.partial_output import PartialOutput, unpack
from sgl_batch.engine.line_frames import (
    Answer,
    Cancel,
    Count,
    Counted,
    Failed,
    FrameError,
    Frames,
    FromFront,
    FromHost,
    NewTokens,
    Ready,
    Recorded,
    Respond,
    pack_body,
    unpack_body,
)
from sgl_batch.errors import EngineError

logger = logging.getLogger(__name__)

# How often what lines have generated is told, so that it outlives the engine, and how much of it in one message.
_TELL_EVERY_S = 2.0
_TELL_BYTES = 1 << 18


class Answering(Protocol):
    """What answers lines where the engine is."""

    async def respond(self, url: str, body: Mapping[str, object], record: PartialOutput) -> LineResponse:
        """Answer one request, whose first tokens are those of `record`.

        Raises EngineError when the engine is dead; cancelling aborts the request.
        """
        ...

    def note_tokens(self) -> None:
        """Put into the records of requests what these have generated."""
        ...

    async def stats(self) -> EngineStats:
        """Counters since the engine started. Raises EngineError when the engine is dead."""
        ...


class LineClient:
    """An engine behind a connection; it never asks a line twice.

    `num_answered` counts lines; `was_busy`: some were not answered when the engine died.
    `forward`: which forward pass computes the model, in words.
    """

    def __init__(self, frames: Frames[FromHost], served_model_names: tuple[str, ...], forward: str = "") -> None:
        self._frames = frames
        self._served_model_names = served_model_names
        self.forward = forward
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._lines: dict[int, PartialOutput] = {}
        self._next_number = 0
        self.death: EngineError | None = None
        self.num_answered = 0
        self.was_busy = False

    @property
    def served_model_names(self) -> tuple[str, ...]:
        """The names accepted in a line's body["model"]."""
        return self._served_model_names

    @property
    def num_in_flight(self) -> int:
        """Lines that wait for their answers."""
        return len(self._lines)

    async def respond(self, url: str, body: Mapping[str, object], record: PartialOutput | None = None) -> LineResponse:
        """Answer one request. Raises EngineError when the engine is dead; cancelling aborts the request.

        The answer goes on from `record`, which grows while it is made.
        """
        number = self._number()
        self._lines[number] = record = PartialOutput() if record is None else record
        try:
            message = Respond(number=number, url=url, body=pack_body(body), recorded=record.pack())
            answer = await self._ask(number, message)
        except asyncio.CancelledError:
            self._frames.write(Cancel(number=number))
            raise
        finally:
            del self._lines[number]
        self.num_answered += 1
        return LineResponse(status_code=answer.status_code, request_id=answer.request_id, body=unpack_body(answer.body))

    async def stats(self) -> EngineStats:
        """Counters since the engine started. Raises EngineError when the engine is dead."""
        number = self._number()
        stats: EngineStats = (await self._ask(number, Count(number=number))).stats
        return stats

    def _number(self) -> int:
        self._next_number += 1
        return self._next_number

    async def _ask(self, number: int, message: Respond | Count) -> Any:
        if self.death is not None:
            raise self.death
        self._waiting[number] = waiter = asyncio.get_running_loop().create_future()
        try:
            await self._frames.send(message)
            return await waiter
        finally:
            del self._waiting[number]

    async def read_answers(self) -> Failed | None:
        """Hand out answers until the connection ends. Returns the other side's last words, if it had any.

        Whoever calls it says then why the engine is gone (`fail`); until that, requests wait.
        """
        while (message := await self._frames.read()) is not None:
            if isinstance(message, Failed):
                return message
            if isinstance(message, Ready):
                raise FrameError("the engine says twice that it is ready")
            if isinstance(message, Recorded):
                self._record(message)
                continue
            waiter = self._waiting.get(message.number)
            if waiter is not None and not waiter.done():
                waiter.set_result(message)
        return None

    def _record(self, message: Recorded) -> None:
        for new in message.news:
            if new.number in self._lines:
                self._lines[new.number].put(new.start, unpack(new.tokens))

    def fail(self, death: EngineError) -> None:
        """The engine is dead: whoever waits, or asks from now on, gets `death`."""
        self.death, self.was_busy = death, bool(self._lines)
        self._frames.close()
        for waiter in self._waiting.values():
            if not waiter.done():
                # Each has one of its own: a traceback is added wherever an exception is raised.
                waiter.set_exception(EngineError(str(death), code=death.code))


async def serve_lines(frames: Frames[FromFront], engine: Answering) -> EngineError | None:
    """Answer what comes over the connection until it ends (None) or the engine is dead (why).

    Requests that are not answered by then are aborted, when what they have generated has been told; so they are when
    this is cancelled.
    """
    server = _LineServer(frames, engine)
    try:
        return await server.run()
    finally:
        await server.tell_tokens()
        await server.abort_all()


class _LineServer:
    def __init__(self, frames: Frames[FromFront], engine: Answering) -> None:
        self._frames, self._engine = frames, engine
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._records: dict[int, PartialOutput] = {}
        self._death: asyncio.Future[EngineError] = asyncio.get_running_loop().create_future()

    async def run(self) -> EngineError | None:
        reading, telling = asyncio.create_task(self._read()), asyncio.create_task(self._keep_telling())
        waits: set[asyncio.Future[Any]] = {reading, telling, self._death}
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            if self._death.done():
                return self._death.result()
            if telling.done():
                telling.result()
            reading.result()
            return None
        finally:
            reading.cancel()
            telling.cancel()

    async def _keep_telling(self) -> NoReturn:
        while True:
            await asyncio.sleep(_TELL_EVERY_S)
            await self.tell_tokens()

    async def tell_tokens(self) -> None:
        """Say what the requests that are not answered have generated since this was last said."""
        self._engine.note_tokens()
        news: list[NewTokens] = []
        num_bytes = 0
        for number, record in list(self._records.items()):
            found = record.take_update()
            if found is None:
                continue
            start, tokens = found
            news.append(NewTokens(number=number, start=start, tokens=tokens))
            num_bytes += len(tokens)
            if num_bytes >= _TELL_BYTES:
                await self._frames.send(Recorded(news=tuple(news)))
                news, num_bytes = [], 0
        if news:
            await self._frames.send(Recorded(news=tuple(news)))

    async def _read(self) -> None:
        while (message := await self._frames.read()) is not None:
            if isinstance(message, Cancel):
                task = self._tasks.get(message.number)
                if task is not None:
                    task.cancel()
                continue
            if isinstance(message, Respond):
                record = self._records[message.number] = PartialOutput(message.recorded)
                work = self._respond(message, record)
            else:
                work = self._count(message)
            task = self._tasks[message.number] = asyncio.create_task(work)
            task.add_done_callback(partial(self._forget, message.number))

    def _forget(self, number: int, _: asyncio.Task[None]) -> None:
        del self._tasks[number]
        if not self._death.done():  # else what it has is still to be told
            self._records.pop(number, None)

    async def _respond(self, message: Respond, record: PartialOutput) -> None:
        try:
            response = await self._engine.respond(message.url, unpack_body(message.body), record)
        except EngineError as error:
            self._dies(error)
            return
        except Exception:
            # A line's fault must not end the others, whoever is to blame for it.
            logger.exception("a request line failed by a fault of the program")
            response = _internal_error(message.number, "the server failed by a fault of its own; see its log")
        await self._answer(message.number, response)

    async def _answer(self, number: int, response: LineResponse) -> None:
        answer = Answer(
            number=number,
            status_code=response.status_code,
            request_id=response.request_id,
            body=pack_body(response.body),
        )
        try:
            await self._frames.send(answer)
        except FrameError as error:
            await self._answer(number, _internal_error(number, f"the answer cannot be sent: {error}"))

    async def _count(self, message: Count) -> None:
        try:
            stats = await self._engine.stats()
        except EngineError as error:
            self._dies(error)
            return
        await self._frames.send(Counted(number=message.number, stats=stats))

    def _dies(self, error: EngineError) -> None:
        if not self._death.done():
            self._death.set_result(error)

    async def abort_all(self) -> None:
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _internal_error(number: int, message: str) -> LineResponse:
    error = {"message": message, "type": "server_error", "param": None, "code": "internal_error"}
    return LineResponse(status_code=500, request_id=f"req_line_{number}", body={"error": error})
