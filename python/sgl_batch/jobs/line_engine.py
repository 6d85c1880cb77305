"""What a job needs from an engine, as a Protocol; decides nothing about how lines are computed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class LineResponse:
    """The answer to one request line: an HTTP status and the body that the online endpoint returns."""

    status_code: int
    request_id: str
    body: dict[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """Counters since the engine started.

    `counters` holds expert_calls, expert_call_tokens and whatever else the engine counts; where it also holds
    prompt_tokens and output_tokens, the progress takes its rates from them while long lines still run.
    `part_s` holds seconds by part (attention, experts, router, copies, sampling, waiting, other).
    `tokens_per_expert` holds the tokens routed to each expert, summed over the layers.
    """

    counters: Mapping[str, float] = field(default_factory=dict)
    part_s: Mapping[str, float] = field(default_factory=dict)
    tokens_per_expert: Sequence[int] = ()

    def since(self, earlier: EngineStats) -> EngineStats:
        """What was counted after `earlier`, a reading of the same engine."""
        before = list(earlier.tokens_per_expert) or [0] * len(self.tokens_per_expert)
        return EngineStats(
            counters={key: value - earlier.counters.get(key, 0) for key, value in self.counters.items()},
            part_s={key: value - earlier.part_s.get(key, 0.0) for key, value in self.part_s.items()},
            tokens_per_expert=[now - then for now, then in zip(self.tokens_per_expert, before, strict=True)],
        )


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
