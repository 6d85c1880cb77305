"""What jobs need from an engine and from who keeps it alive, as Protocols; decides not how lines are computed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from sgl_batch.core.answers import EngineStats, LineResponse
from sgl_batch.core.partial_output import PartialOutput


class LineEngine(Protocol):
    """An engine that answers request lines. One object stands for one life of an engine: a restarted one is another."""

    @property
    def served_model_names(self) -> tuple[str, ...]:
        """The names accepted in a line's body["model"]."""
        ...

    async def respond(self, url: str, body: Mapping[str, object], record: PartialOutput | None = None) -> LineResponse:
        """Answer one request; a bad one gets a 4xx with {"error": {...}} as its body.

        `record` has its first tokens from an engine that died, if any, and the answer goes on from there; what is
        known of it before it is whole is put there.

        Raises EngineError only when the engine itself is dead: then the lines that were in flight are suspected of
        having killed it. Cancelling the call aborts the request.
        """
        ...

    async def stats(self) -> EngineStats:
        """Counters since the engine started. Raises EngineError when the engine is dead."""
        ...


class EngineSource(Protocol):
    """Who keeps an engine alive: it may be absent (starting, crashed) and come back as a new object."""

    def current(self) -> LineEngine | None:
        """The engine that is ready now; None while there is none."""
        ...

    async def available(self, other_than: LineEngine | None = None) -> LineEngine:
        """Wait, as long as it takes, for a ready engine that is not `other_than` (one that was found dead).

        It never raises on its own; who waits cancels the call.
        """
        ...
