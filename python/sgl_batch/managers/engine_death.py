"""Owns the note that an engine is dead, and ends all that its program awaits from it. Its users decide on a restart."""

from __future__ import annotations

import asyncio
from asyncio import AbstractEventLoop
from collections.abc import Awaitable, Callable

from sgl_batch.errors import EngineError
from sgl_batch.sglang_adapter.types.messages import RequestState

SHUT_DOWN = "the engine has been shut down: make another one"


class EngineDeath:
    """`error`: why the engine answers nothing any more; None while it lives.

    `is_raised`: whether all that waits for the engine raises the error. It is unset where request lines read `error`
    themselves, and save their tokens first.
    """

    def __init__(self) -> None:
        self.error: EngineError | None = None
        self.is_raised = True
        self._calls: set[asyncio.Future[object]] = set()

    def note(self, error: EngineError, states: dict[str, RequestState], loop: AbstractEventLoop | None) -> None:
        """Note that the engine is dead, for the first reason given. Any thread may call this.

        `states`: the requests under way. `loop`: the event loop that awaits them.
        """
        self.error = self.error or error
        if self.is_raised and loop is not None and not loop.is_closed():
            loop.call_soon_threadsafe(self._end_waits, states)

    def raise_if_dead(self) -> None:
        """Raise EngineError if the engine is dead and `is_raised`."""
        if self.error is not None and self.is_raised:
            raise EngineError(str(self.error), code=self.error.code)

    async def unless_dead(self, call: Callable[[object], Awaitable[object]], asked: object) -> object:
        """Return the schedulers' answer to a call. Raises EngineError as soon as the engine is dead."""
        self.raise_if_dead()
        answer = asyncio.ensure_future(call(asked))
        self._calls.add(answer)
        try:
            return await answer
        except asyncio.CancelledError:
            self.raise_if_dead()
            raise
        finally:
            self._calls.discard(answer)

    def _end_waits(self, states: dict[str, RequestState]) -> None:
        for answer in self._calls:
            answer.cancel()
        for rid, state in states.items():
            # The reader of this answer checks its finish reason first, and raises.
            state.out_list = [{"meta_info": {"id": rid, "finish_reason": {"type": "abort"}}}]
            state.finished = True
            state.event.set()
        states.clear()
