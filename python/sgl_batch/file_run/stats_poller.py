"""Reads an engine's counters without waiting long for them."""

from __future__ import annotations

import asyncio

from sgl_batch.core.answers import EngineStats
from sgl_batch.jobs.line_engine import LineEngine


class StatsPoller:
    """Reads the counters, one reading at a time. A reading is never cancelled while the run lasts.

    An engine in a long step answers late, and the answer to a cancelled question could be taken for the answer to
    the next one.
    """

    def __init__(self, engine: LineEngine) -> None:
        self._engine = engine
        self._reading: asyncio.Task[EngineStats] | None = None

    async def poll(self, wait_s: float) -> EngineStats | None:
        """Return the counters, or None when they do not come within `wait_s`. Raises EngineError from the engine."""
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
        """Return counters, as `poll` does, of a reading that begins after this call."""
        if self._reading is not None and await self.poll(wait_s) is None:
            return None
        return await self.poll(wait_s)

    def abandon(self) -> None:
        """Drop a reading under way, at the end of a run."""
        if self._reading is not None:
            self._reading.cancel()
            self._reading = None
