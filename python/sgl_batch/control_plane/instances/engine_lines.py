"""Owns the lines that the engines of one instance have, each from its start to its answer or its engine's death."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

from sgl_batch.control_plane.instances.messages import Line, Tokens
from sgl_batch.core.answers import EngineStats
from sgl_batch.core.partial_output import PartialOutput
from sgl_batch.core.plan_rates import PlanRates
from sgl_batch.engine.line_frames import Answer, pack_body
from sgl_batch.errors import EngineError
from sgl_batch.jobs.result_lines import internal_error_response

logger = logging.getLogger(__name__)

_ALL_FAIL_WITHIN_S = 10.0


class PackedEngine(Protocol):
    """What a `LineClient` gives: a `jobs.line_engine.LineEngine` to which bodies are bytes."""

    @property
    def served_model_names(self) -> tuple[str, ...]:
        """The names accepted in a line's body["model"]."""
        ...

    @property
    def plan_rates(self) -> PlanRates | None:
        """What the plan of the engine's start predicts."""
        ...

    async def respond_packed(self, url: str, body: bytes, partial_output: PartialOutput | None = None) -> Answer:
        """Answer one request. Raises EngineError when the engine is dead. Cancelling the call aborts the request."""
        ...

    async def stats(self) -> EngineStats:
        """Return its statistics. Raises EngineError when the engine is dead."""
        ...


@dataclass(slots=True, eq=False)
class LineInFlight:
    """A line that an engine has. `num_given`: the tokens that it came with. `resend`: report all its tokens again."""

    key: str
    partial_output: PartialOutput
    num_given: int
    session: _Session
    task: asyncio.Task[Answer] | None = None
    resend: bool = False

    def take_tokens(self) -> Tokens | None:
        """Return the tokens that were not reported yet, or None."""
        update = self.partial_output.take_update()
        if self.resend:
            self.resend = False
            return Tokens(self.key, 0, self.partial_output.pack()) if len(self.partial_output) else None
        return None if update is None else Tokens(self.key, *update)


@dataclass(slots=True, eq=False)
class _Session:
    """The lines that one engine has, by key. `dead`: those that raised its death."""

    engine: PackedEngine
    lines: dict[str, LineInFlight] = field(default_factory=dict)
    dead: list[LineInFlight] = field(default_factory=list)
    death: EngineError | None = None


class EngineLines:
    """The lines in flight, by key.

    Args:
        on_answer: Called with the key of a line, and the status, request id and body of its answer.
        on_death: Called when an engine has died and all its lines have ended: with its error and these lines.
    """

    def __init__(
        self,
        on_answer: Callable[[str, int, str, bytes], None],
        on_death: Callable[[EngineError, list[LineInFlight]], None],
    ) -> None:
        self._on_answer, self._on_death = on_answer, on_death
        self._lines: dict[str, LineInFlight] = {}
        self._session: _Session | None = None

    def __len__(self) -> int:
        return len(self._lines)

    def __iter__(self) -> Iterator[LineInFlight]:
        return iter(self._lines.values())

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys of all lines."""
        return tuple(self._lines)

    def get(self, key: str) -> LineInFlight | None:
        """Return the line of a key, or None."""
        return self._lines.get(key)

    def is_dead(self, engine: PackedEngine) -> bool:
        """Whether lines have found this engine dead."""
        return self._session is not None and self._session.engine is engine and self._session.death is not None

    def start(self, engine: PackedEngine, line: Line) -> None:
        """Give a line to an engine."""
        session = self._session
        if session is None or session.engine is not engine:
            session = self._session = _Session(engine)
        partial_output = PartialOutput(line.partial_output)
        one = LineInFlight(line.key, partial_output, len(partial_output), session)
        self._lines[line.key] = session.lines[line.key] = one
        one.task = asyncio.create_task(engine.respond_packed(line.url, line.body, partial_output))
        one.task.add_done_callback(lambda task: self._ended(one, task))

    def take_back(self, count: int) -> tuple[str, ...]:
        """Abort up to so many lines that have got no token here, the last ones first. Returns their keys."""
        found: list[str] = []
        for key, line in reversed(self._lines.items()):
            if len(found) >= count:
                break
            if len(line.partial_output) == line.num_given and line.session.death is None:
                found.append(key)
        self.drop(found)
        return tuple(found)

    def give_up(self, keys: Iterable[str]) -> tuple[str, ...]:
        """Abort those of these lines that wait for a living engine. Returns their keys."""
        lines = [line for key in keys if (line := self._lines.get(key)) is not None and line.session.death is None]
        found = tuple(line.key for line in lines)
        self.drop(found)
        return found

    def drop(self, keys: Iterable[str]) -> None:
        """Abort lines. They get no answer any more, and their engine's death does not name them."""
        for key in keys:
            line = self._lines.pop(key, None)
            if line is not None:
                del line.session.lines[key]
                assert line.task is not None, "it has begun"
                line.task.cancel()
                self._end_if_dead(line.session)

    def _ended(self, line: LineInFlight, task: asyncio.Task[Answer]) -> None:
        error = None if task.cancelled() else task.exception()
        if self._lines.get(line.key) is not line:
            return  # it was dropped
        session = line.session
        del self._lines[line.key], session.lines[line.key]
        if isinstance(error, EngineError) or (task.cancelled() and session.death is not None):
            session.dead.append(line)
            if isinstance(error, EngineError) and session.death is None:
                session.death = error
                asyncio.get_running_loop().call_later(_ALL_FAIL_WITHIN_S, self._end_rest, session)
        elif error is not None or task.cancelled():
            # A fault of the program with this line: it fails, and the other lines go on.
            cause = error if error is not None else asyncio.CancelledError("cancelled inside the engine")
            logger.error("line %s: the engine raised", line.key, exc_info=cause)
            failure = internal_error_response(line.key, cause)
            self._on_answer(line.key, failure.status_code, failure.request_id, pack_body(failure.body))
        else:
            answer = task.result()
            self._on_answer(line.key, answer.status_code, answer.request_id, answer.body)
        self._end_if_dead(session)

    def _end_if_dead(self, session: _Session) -> None:
        if session.death is not None and session.dead and not session.lines:
            dead, session.dead = session.dead, []
            self._on_death(session.death, dead)

    def _end_rest(self, session: _Session) -> None:
        """End the lines of a dead engine that have not raised its death themselves."""
        for line in session.lines.values():
            assert line.task is not None, "it has begun"
            line.task.cancel()
