"""Owns the end of the event loop that SGLang's engine makes where none runs: its tasks, then its descriptors."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable
from contextlib import suppress
from typing import NoReturn

from sgl_batch.errors import EngineError
from sgl_batch.managers.engine_death import SHUT_DOWN

# How long cancelled tasks may take to end.
_END_S = 2.0
# Turns of the loop in which such a task is made and run.
_TURNS = 3


class ClosedLoop:
    """Stands for the loop of an engine that was shut down."""

    def is_running(self) -> bool:
        """Return False."""
        return False

    def is_closed(self) -> bool:
        """Return True."""
        return True

    def run_until_complete(self, call: Awaitable[object]) -> NoReturn:
        """Raise EngineError in place of making the call."""
        close = getattr(call, "close", None)
        if close is not None:
            close()  # else Python warns that nothing has awaited it
        raise EngineError(SHUT_DOWN)


class OwnLoop:
    """Ends an engine's loop, unless the loop is its user's. Made before the engine, in the thread that makes it."""

    def __init__(self) -> None:
        self._thread = None if _runs_inside_loop() else threading.get_ident()

    def end_tasks(self, loop: asyncio.AbstractEventLoop) -> None:
        """Cancel all tasks of the loop, close its asynchronous generators, and wait for their end."""
        if not self._can_run(loop):
            return
        # An answer that was not read to its end has left a generator behind: asyncio makes a task that ends it.
        for _ in range(_TURNS):
            loop.run_until_complete(asyncio.sleep(0))
        tasks = asyncio.all_tasks(loop)
        for task in tasks:
            task.cancel()
        if tasks:
            done, _ = loop.run_until_complete(asyncio.wait(tasks, timeout=_END_S))
            for task in done:
                if not task.cancelled():
                    task.exception()  # asyncio reports an exception that was never read; nothing awaits this one
        loop.run_until_complete(loop.shutdown_asyncgens())

    def close(self, loop: asyncio.AbstractEventLoop) -> asyncio.AbstractEventLoop | ClosedLoop:
        """Close the loop and its descriptors. It is the thread's current loop no more.

        Returns what stands for it from now on: the loop itself where it is left open.
        """
        if not self._can_run(loop):
            return loop
        with suppress(RuntimeError):  # the thread has no current loop
            if asyncio.get_event_loop_policy().get_event_loop() is loop:
                asyncio.set_event_loop(None)
        loop.close()
        return ClosedLoop()

    def _can_run(self, loop: asyncio.AbstractEventLoop) -> bool:
        is_here = self._thread == threading.get_ident() and not _runs_inside_loop()
        return is_here and not loop.is_running() and not loop.is_closed()


def _runs_inside_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
