"""Owns the connection by which request lines reach an engine in another process, and answers come back.

`LineClient` stands for the engine in the server's process. `serve_lines` answers in the engine's process. Neither knows
jobs, or why a process starts and ends.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any, NoReturn, Protocol

from sgl_batch.core.answers import EngineStats, LineResponse
from sgl_batch.core.partial_output import PartialOutput, unpack
from sgl_batch.core.plan_rates import PlanRates
from sgl_batch.engine.line_frames import (
    Answer,
    Cancel,
    Count,
    Counted,
    Failed,
    FrameError,
    Frames,
    FromEngine,
    FromFront,
    PartialOutputUpdate,
    PartialOutputUpdates,
    Ready,
    Respond,
    pack_body,
    unpack_body,
)
from sgl_batch.errors import EngineError

logger = logging.getLogger(__name__)

# Tokens of unanswered lines are reported this often, so that they outlive the engine, in messages of about this size.
_REPORT_EVERY_S = 2.0
_REPORT_BYTES = 1 << 18


class Answering(Protocol):
    """What answers lines in the engine's process."""

    async def respond(self, url: str, body: Mapping[str, object], partial_output: PartialOutput) -> LineResponse:
        """Answer one request, whose first tokens are those of `partial_output`.

        Raises EngineError when the engine is dead. Cancelling the call aborts the request.
        """
        ...

    def update_partial_outputs(self) -> None:
        """Put the tokens that requests have generated into their partial outputs."""
        ...

    async def stats(self) -> EngineStats:
        """Return the counters since the engine started. Raises EngineError when the engine is dead."""
        ...


class LineClient:
    """The engine at the other end of a connection. It sends each line once.

    `num_answered` counts lines. `was_busy`: some lines were not answered when the engine died. `forward` names the
    forward pass that computes the model. `plan_rates`: what the engine's plan predicts; None without a profile.
    """

    def __init__(
        self,
        frames: Frames[FromEngine],
        served_model_names: tuple[str, ...],
        forward: str = "",
        plan_rates: PlanRates | None = None,
    ) -> None:
        self._frames = frames
        self._served_model_names = served_model_names
        self.forward = forward
        self.plan_rates = plan_rates
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
        """How many lines wait for their answers."""
        return len(self._lines)

    async def respond(
        self, url: str, body: Mapping[str, object], partial_output: PartialOutput | None = None
    ) -> LineResponse:
        """Answer one request. Raises EngineError when the engine is dead. Cancelling the call aborts the request.

        The answer continues `partial_output`, which grows while the engine generates.
        """
        answer = await self.respond_packed(url, pack_body(body), partial_output)
        return LineResponse(status_code=answer.status_code, request_id=answer.request_id, body=unpack_body(answer.body))

    async def respond_packed(self, url: str, body: bytes, partial_output: PartialOutput | None = None) -> Answer:
        """Do what `respond` does for a packed body, and return the answer with its body packed."""
        number = self._number()
        self._lines[number] = partial_output = PartialOutput() if partial_output is None else partial_output
        try:
            message = Respond(number=number, url=url, body=body, partial_output=partial_output.pack())
            answer: Answer = await self._ask(number, message)
        except asyncio.CancelledError:
            self._frames.write(Cancel(number=number))
            raise
        finally:
            del self._lines[number]
        self.num_answered += 1
        return answer

    def acknowledge(self, request_ids: Iterable[str]) -> None:
        """It keeps no answers."""

    async def stats(self) -> EngineStats:
        """Return the counters since the engine started. Raises EngineError when the engine is dead."""
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
        """Pass answers to their callers until the connection ends. Return why the engine failed, if it has said so.

        A failed engine waits for the end of the connection, and gets it. The caller then calls `fail` with the reason
        of the engine's death. Until that, requests wait.
        """
        while (message := await self._frames.read()) is not None:
            if isinstance(message, Failed):
                self._frames.close()
                return message
            if isinstance(message, Ready):
                raise FrameError("the engine has reported twice that it is ready")
            if isinstance(message, PartialOutputUpdates):
                self._update_partial_outputs(message)
                continue
            waiter = self._waiting.get(message.number)
            if waiter is not None and not waiter.done():
                waiter.set_result(message)
        return None

    def _update_partial_outputs(self, message: PartialOutputUpdates) -> None:
        for update in message.updates:
            if update.number in self._lines:
                self._lines[update.number].put(update.start, unpack(update.tokens))

    def fail(self, death: EngineError) -> None:
        """Mark the engine as dead: every waiting and every later call raises `death`."""
        self.death, self.was_busy = death, bool(self._lines)
        self._frames.close()
        for waiter in self._waiting.values():
            if not waiter.done():
                # Each caller gets its own exception: raising adds a traceback to it.
                waiter.set_exception(EngineError(str(death), code=death.code))


async def serve_lines(frames: Frames[FromFront], engine: Answering) -> EngineError | None:
    """Answer the requests that come over the connection. Return None when it ends, the error when the engine dies.

    At the end, and when the call is cancelled, the tokens of unanswered requests are reported, then these are aborted.
    """
    server = _LineServer(frames, engine)
    try:
        return await server.run()
    finally:
        await server.report_tokens()
        await server.abort_all()


class _LineServer:
    def __init__(self, frames: Frames[FromFront], engine: Answering) -> None:
        self._frames, self._engine = frames, engine
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._partial_outputs: dict[int, PartialOutput] = {}
        self._death: asyncio.Future[EngineError] = asyncio.get_running_loop().create_future()

    async def run(self) -> EngineError | None:
        reading, reporting = asyncio.create_task(self._read()), asyncio.create_task(self._report_repeatedly())
        waits: set[asyncio.Future[Any]] = {reading, reporting, self._death}
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            if self._death.done():
                return self._death.result()
            if reporting.done():
                reporting.result()
            reading.result()
            return None
        finally:
            reading.cancel()
            reporting.cancel()

    async def _report_repeatedly(self) -> NoReturn:
        while True:
            await asyncio.sleep(_REPORT_EVERY_S)
            await self.report_tokens()

    async def report_tokens(self) -> None:
        """Report the tokens that unanswered requests have generated since the last report."""
        self._engine.update_partial_outputs()
        updates: list[PartialOutputUpdate] = []
        num_bytes = 0
        for number, partial_output in list(self._partial_outputs.items()):
            found = partial_output.take_update()
            if found is None:
                continue
            start, tokens = found
            updates.append(PartialOutputUpdate(number=number, start=start, tokens=tokens))
            num_bytes += len(tokens)
            if num_bytes >= _REPORT_BYTES:
                await self._frames.send(PartialOutputUpdates(updates=tuple(updates)))
                updates, num_bytes = [], 0
        if updates:
            await self._frames.send(PartialOutputUpdates(updates=tuple(updates)))

    async def _read(self) -> None:
        while (message := await self._frames.read()) is not None:
            if isinstance(message, Cancel):
                task = self._tasks.get(message.number)
                if task is not None:
                    task.cancel()
                continue
            if isinstance(message, Respond):
                partial_output = self._partial_outputs[message.number] = PartialOutput(message.partial_output)
                work = self._respond(message, partial_output)
            else:
                work = self._count(message)
            task = self._tasks[message.number] = asyncio.create_task(work)
            task.add_done_callback(partial(self._forget, message.number))

    def _forget(self, number: int, _: asyncio.Task[None]) -> None:
        del self._tasks[number]
        if not self._death.done():  # after its death the tokens are still to be reported
            self._partial_outputs.pop(number, None)

    async def _respond(self, message: Respond, partial_output: PartialOutput) -> None:
        try:
            response = await self._engine.respond(message.url, unpack_body(message.body), partial_output)
        except EngineError as error:
            self._dies(error)
            return
        except Exception:
            # A fault in one line must not end the others, whatever caused it.
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
