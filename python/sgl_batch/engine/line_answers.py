"""Answers single request lines with the engine of this process. It knows no jobs and no files."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Coroutine, Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from sgl_batch.core.answers import EngineStats, LineResponse
from sgl_batch.core.partial_output import PartialOutput
from sgl_batch.core.plan_rates import PlanRates
from sgl_batch.engine.rank_stats import engine_stats, merged_stats
from sgl_batch.errors import EngineError
from sgl_batch.sglang_adapter.names import ENGINE_ABORT
from sgl_batch.sglang_adapter.openai_api import OpenAIEndpoints

if TYPE_CHECKING:
    from sgl_batch.managers.tokenizer_manager import BatchTokenizerManager

Result = TypeVar("Result")

_MAX_TRIES = 2  # of a request that the engine itself aborts


class LineAnswers:
    """Answers OpenAI requests, all under one name of the model, until the engine dies.

    Where it dies of a cause that the user can fix, the lines left are answered with that cause as their error.
    """

    def __init__(
        self,
        tokenizer_manager: BatchTokenizerManager,
        template_manager: object,
        death: Callable[[], EngineError | None],
    ) -> None:
        self._manager = tokenizer_manager
        self._endpoints = OpenAIEndpoints(tokenizer_manager, template_manager, tokenizer_manager.check_openai)
        self._death = death
        self._last_stats = EngineStats()

    @property
    def plan_rates(self) -> PlanRates | None:
        """None: a program in this process asks `Engine.predict`, which is closer."""
        return None

    @property
    def served_model_names(self) -> tuple[str, ...]:
        return (self._manager.served_model_name,)

    async def respond(
        self, url: str, body: Mapping[str, object], partial_output: PartialOutput | None = None
    ) -> LineResponse:
        """Answer one request. Raises EngineError when the engine is dead. Cancelling the call aborts the request.

        The answer continues `partial_output` where it can do so exactly. `update_partial_outputs` brings it up to date.
        """
        try:
            status, content = await self._unless_dead(lambda: self._answer(url, body, partial_output))
        except EngineError as error:
            self.update_partial_outputs()  # while the manager still knows this request
            if error.code is None:
                raise
            status, content = 503, _error_body(str(error), error.code)
        request_id = str(content.get("id") or f"req_{uuid.uuid4().hex}")
        return LineResponse(status_code=status, request_id=request_id, body=content)

    async def _answer(
        self, url: str, body: Mapping[str, object], partial_output: PartialOutput | None
    ) -> tuple[int, dict[str, Any]]:
        """Return the endpoint's answer to a request, and repeat the request where it was aborted.

        An operator who aborts all requests of the engine (to pause it, for example) means the online ones: a line that
        is not cancelled gets a whole answer, however often it is aborted. While the engine is paused, the line waits.
        A request that the engine aborts by itself is tried once more; a second such abort is its error.
        """
        tries = 0
        while True:
            rid = uuid.uuid4().hex
            with self._manager.partial_outputs.of(rid, partial_output):
                status, content = await self._endpoints.post(url, body, rid)
            tries += _is_engines_own_abort(content)
            if not _is_aborted(content) and not (_is_engines_own_abort(content) and tries < _MAX_TRIES):
                return status, content
            if partial_output is not None:
                partial_output.cut(0)

    def update_partial_outputs(self) -> None:
        """Put the tokens that lines have generated into their partial outputs."""
        self._manager.partial_outputs.bring_up_to_date(self._manager.rid_to_state)

    def acknowledge(self, request_ids: Iterable[str]) -> None:
        """It keeps no answers."""

    async def stats(self) -> EngineStats:
        """Return the counters since the engine started. Raises EngineError where a dead engine answers nothing."""
        try:
            states = await self._unless_dead(self._manager.get_internal_state)
        except EngineError as error:
            if error.code is None:
                raise
            return self._last_stats
        stats = engine_stats(merged_stats([state["sgl_batch"] for state in states]))
        self._last_stats = replace(stats, paused=self._manager.is_pause)
        return self._last_stats

    async def _unless_dead(self, work: Callable[[], Coroutine[object, object, Result]]) -> Result:
        """Return the result of `work`. Raises EngineError as soon as an engine process is found dead."""
        death = self._death()
        if death is not None:
            raise death
        task = asyncio.ensure_future(work())
        try:
            while True:
                done, _ = await asyncio.wait({task}, timeout=1.0)
                if done:
                    return task.result()
                death = self._death()
                if death is not None:
                    raise death
        finally:
            task.cancel()


def _is_aborted(content: Mapping[str, Any]) -> bool:
    """Return whether a request was aborted on demand."""
    return any(choice.get("finish_reason") == "abort" for choice in content.get("choices", ()))


def _is_engines_own_abort(content: Mapping[str, Any]) -> bool:
    return bool((content.get("error") or {}).get("code") == ENGINE_ABORT)


def _error_body(message: str, code: str) -> dict[str, object]:
    return {"error": {"message": message, "type": "server_error", "param": None, "code": code}}
