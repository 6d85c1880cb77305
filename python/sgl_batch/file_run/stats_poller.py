"""Reads an engine's counters without ever waiting long for them; decides nothing about what they mean."""

from __future__ import annotations

import asyncio

from sgl_batch.core.answers import EngineStats
from sgl_batch.jobs.line_engine import LineEngine


class StatsPoller:
    """At most one reading is under way, and it is never cancelled while the run lasts.

    An engine in the middle of a long step answers late, and the answer to a cancelled question could be taken
    for that of the next one.
    """

    def __init__(self, engine: LineEngine) -> None:
        self._engine = engine
        self._reading: asyncio.Task[EngineStats] | None = None

    async def poll(self, wait_s: float) -> EngineStats | None:
        """The counters, or None when they do not come within `wait_s`. Raises EngineError from the engine."""
        if self._reading is None:
            self._reading = asyncio.ensure_future(self._engine.stats())
        reading = self._reading
        done, _ = await asyncio.wait({reading}, timeout=wait_s)
        if not done:
            return None
        if self._reading is reading:
            self._reading = None
        return reading.result()

    async def poll_new(self, wait_s: float) -> EngineStats | None:
        """Like `poll`, but asked after this call, whatever was under way."""
        if self._reading is not None and await self.poll(wait_s) is None:
            return None
        return await self.poll(wait_s)

    def abandon(self) -> None:
        """Drop a reading that is still under way; for the end of a run."""
        if self._reading is not None:
            self._reading.cancel()
            self._reading = None
