"""What a job needs from an engine, as a Protocol; decides nothing about how lines are computed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from sgl_batch.core.answers import EngineStats, LineResponse


class LineEngine(Protocol):
    """An engine that answers request lines."""

    @property
    def served_model_names(self) -> tuple[str, ...]:
        """The names accepted in a line's body["model"]."""
        ...

    async def respond(self, url: str, body: Mapping[str, object]) -> LineResponse:
        """Answer one request; a bad one gets a 4xx with {"error": {...}} as its body.

        Raises EngineError only when the engine itself is dead. Cancelling the call aborts the request.
        """
        ...

    async def stats(self) -> EngineStats:
        """Counters since the engine started. Raises EngineError when the engine is dead."""
        ...
