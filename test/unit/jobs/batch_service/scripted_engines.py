"""Engines without a model, and their source, for tests of the batch service."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterable, Mapping
from hashlib import sha256

from sgl_batch.core.answers import EngineStats, LineResponse
from sgl_batch.core.partial_output import PartialOutput
from sgl_batch.core.plan_rates import PlanRates
from sgl_batch.errors import EngineError

Script = Callable[["ScriptedEngine", Mapping[str, object]], Awaitable[LineResponse | None]]


async def answer_at_once(engine: ScriptedEngine, body: Mapping[str, object]) -> None:
    """Give the usual answer, without a wait."""


class ScriptedEngine:
    """Implements LineEngine. Its answers depend on the request alone; the script may wait, refuse or kill it.

    `generates`: tokens that it has of each answer, before it waits; `resumed` are the tokens with which lines came.
    `died_with` are the prompts that were in flight when it was killed.
    """

    served_model_names = ("tiny",)

    def __init__(
        self, script: Script = answer_at_once, generates: int = 0, plan_rates: PlanRates | None = None
    ) -> None:
        self.plan_rates = plan_rates
        self.generates = generates
        self.resumed: dict[str, list[int]] = {}
        self.prompts: list[str] = []
        self.in_flight: list[str] = []
        self.in_flight_at: list[frozenset[str]] = []
        self.died_with: frozenset[str] = frozenset()
        self.death = asyncio.Event()
        self._code: str | None = None
        self._script = script

    async def respond(
        self, url: str, body: Mapping[str, object], partial_output: PartialOutput | None = None
    ) -> LineResponse:
        prompt = str(body.get("prompt"))
        if partial_output is not None:
            self.resumed[prompt] = list(partial_output.tokens)
            partial_output.put(len(partial_output), range(len(partial_output), len(partial_output) + self.generates))
        self.prompts.append(prompt)
        self.in_flight.append(prompt)
        self.in_flight_at.append(frozenset(self.in_flight))
        try:
            return await self._unless_dead(body)
        finally:
            self.in_flight.remove(prompt)

    def acknowledge(self, request_ids: Iterable[str]) -> None:
        """It keeps no answers."""

    async def stats(self) -> EngineStats:
        return EngineStats()

    def kill(self, code: str | None = None) -> None:
        """Every line in flight, and every later one, gets EngineError."""
        if not self.death.is_set():
            self._code = code
            self.died_with = frozenset(self.in_flight)
        self.death.set()

    async def _unless_dead(self, body: Mapping[str, object]) -> LineResponse:
        if self._script is answer_at_once and not self.death.is_set():
            return answer(body)
        scripted = asyncio.ensure_future(self._script(self, body))
        dead = asyncio.ensure_future(self.death.wait())
        try:
            await asyncio.wait({scripted, dead}, return_when=asyncio.FIRST_COMPLETED)
            if self.death.is_set():
                raise EngineError("the scheduler process ended with signal 9", code=self._code)
            return scripted.result() or answer(body)
        finally:
            scripted.cancel()
            dead.cancel()
            await asyncio.wait({scripted})  # an aborted line is held until its script lets go of it


class ScriptedSource:
    """Implements EngineSource: starts the next engine as soon as one is dead, unless it is held."""

    def __init__(
        self,
        script: Script = answer_at_once,
        *,
        is_up: bool = True,
        generates: int = 0,
        plan_rates: PlanRates | None = None,
    ) -> None:
        self._plan_rates = plan_rates
        self.engines: list[ScriptedEngine] = []
        self._generates = generates
        self._script = script
        self._up = asyncio.Event()
        if is_up:
            self._up.set()

    def start(self) -> None:
        """Let there be engines."""
        self._up.set()

    def current(self) -> ScriptedEngine | None:
        if not self._up.is_set():
            return None
        if not self.engines or self.engines[-1].death.is_set():
            self.engines.append(ScriptedEngine(self._script, self._generates, self._plan_rates))
        return self.engines[-1]

    async def available(self, other_than: object = None) -> ScriptedEngine:
        await self._up.wait()
        engine = self.current()
        assert engine is not None
        assert engine is not other_than, "it is not dead"
        return engine


def answer(body: Mapping[str, object]) -> LineResponse:
    """Return an answer that depends only on the request and its seed."""
    text = sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
    usage = {
        "prompt_tokens": 7,
        "completion_tokens": 5,
        "total_tokens": 12,
        "prompt_tokens_details": {"cached_tokens": 2},
        "completion_tokens_details": {"reasoning_tokens": 1},
    }
    return LineResponse(
        status_code=200, request_id=f"req_{text[:8]}", body={"choices": [{"text": text}], "usage": usage}
    )


def refusal(message: str = "the prompt is too long", code: str = "context_length_exceeded") -> LineResponse:
    """Return a 400 in OpenAI's shape."""
    error = {"message": message, "type": "invalid_request_error", "param": "prompt", "code": code}
    return LineResponse(status_code=400, request_id="req_refused", body={"error": error})


async def hold_marked(engine: ScriptedEngine, body: Mapping[str, object]) -> LineResponse | None:
    """Never answer lines whose prompt begins with "hold", and answer those with "slow" a little later."""
    prompt = str(body["prompt"])
    if prompt.startswith("hold"):
        await asyncio.Event().wait()
    if prompt == "refuse":
        return refusal()
    if prompt == "fault":
        raise ValueError("a fault in the program")
    return None
