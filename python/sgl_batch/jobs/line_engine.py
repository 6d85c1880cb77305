"""Owns what jobs need from an engine, and from the supervisor that keeps one running, as Protocols."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

from sgl_batch.core.answers import EngineStats, LineResponse
from sgl_batch.core.partial_output import PartialOutput
from sgl_batch.core.plan_rates import PlanRates


class LineEngine(Protocol):
    """An engine that answers request lines.

    One object stands for one engine from its start to its death. After a restart the source gives a new object; the old
    one stays dead. All methods are called on one event loop, and any number of `respond` calls may run at once.
    """

    @property
    def served_model_names(self) -> tuple[str, ...]:
        """The names accepted in a line's body["model"]. They do not change as long as the engine runs."""
        ...

    @property
    def plan_rates(self) -> PlanRates | None:
        """What the plan of the engine's start predicts. None without a profile, or where no job asks for it."""
        ...

    async def respond(
        self, url: str, body: Mapping[str, object], partial_output: PartialOutput | None = None
    ) -> LineResponse:
        """Answer one request.

        Cancelling the call aborts the request in the engine.

        Args:
            url: The endpoint, one of `request_line.SUPPORTED_URLS`.
            body: The request. The engine does not change it.
            partial_output: The first tokens of the answer, from an engine that died; empty or None to start from the
                beginning. The answer continues these tokens where the engine can do so exactly. The engine appends the
                tokens that it generates, some seconds late, until the call returns. The caller keeps the object: when
                the engine dies, it gives the same object to the next one.

        Returns:
            The whole answer. A bad request is answered too: with status 4xx, and {"error": {...}} as its body.

        Raises:
            EngineError: The engine is dead. Every line in flight may have killed it, unless `code` is set: then the
                reason is known (a full disk, say) and no line is to blame.
        """
        ...

    def acknowledge(self, request_ids: Iterable[str]) -> None:
        """Say that the answers of these ids (`LineResponse.request_id`) are on the disk.

        An engine that keeps answers until then need keep them no longer; for others it makes no difference.
        """
        ...

    async def stats(self) -> EngineStats:
        """Return the counters since the engine started. Raises EngineError when the engine is dead."""
        ...


class EngineSource(Protocol):
    """Gives the engine that runs now. It may be absent (starting, crashed), and come back as a new object."""

    def current(self) -> LineEngine | None:
        """Return the engine that is ready now, or None while there is none.

        It may be dead already: its death shows in the next call of `respond`.
        """
        ...

    async def available(self, other_than: LineEngine | None = None) -> LineEngine:
        """Wait, as long as it takes, until an engine is ready, and return it.

        It raises nothing of its own. The caller cancels the call when it no longer needs an engine.

        Args:
            other_than: An engine that the caller has found dead, and that is not to be returned again.
        """
        ...
