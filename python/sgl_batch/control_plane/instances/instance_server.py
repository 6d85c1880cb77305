"""Owns what one instance does for the pool: lines to its engine, answers to its spool, reports of both; not Ray.

It computes what it was given also while no pool asks. Its engine is kept running by a supervisor, as in a server.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

from sgl_batch.api.engine_endpoints import Endpoints
from sgl_batch.api.engine_view import EngineView
from sgl_batch.api.supervisor import EngineState
from sgl_batch.control_plane.instances.engine_lines import EngineLines, LineInFlight, PackedEngine
from sgl_batch.control_plane.instances.engine_preparation import PreparedEngine
from sgl_batch.control_plane.instances.http_calls import HttpCalls
from sgl_batch.control_plane.instances.http_messages import Control, Controlled, HttpMore, HttpPart, HttpRequest
from sgl_batch.control_plane.instances.messages import EngineDeath, EngineFacts, Lot, Poll, Reading, Report, Tokens
from sgl_batch.control_plane.instances.service_state import ServiceState
from sgl_batch.control_plane.instances.spool import Spool
from sgl_batch.core.answers import EngineStats
from sgl_batch.errors import EngineError

STOPPED = "instance_stopped"
ANSWER_LOST = "answer_lost"
_LOOK_EVERY_S = 0.5
_TOKENS_EVERY_S = 1.0
_ANSWER_BYTES = 3 << 20  # of one report; with the tokens at most about 4 MiB
_TOKEN_BYTES = 1 << 20
_SPOOL_WITHIN_S = 10.0
_COUNT_WITHIN_S = 10.0


class Supervisor(Protocol):
    """What `api.supervisor.EngineSupervisor` gives."""

    view: EngineView

    @property
    def state(self) -> EngineState:
        """The state of the engine."""
        ...

    def current(self) -> PackedEngine | None:
        """Return the engine that is ready now, or None."""
        ...

    def endpoints(self) -> Endpoints | None:
        """Return SGLang's endpoints of the ready engine, or None."""
        ...

    def start(self) -> asyncio.Task[None]:
        """Begin to keep an engine running."""
        ...

    async def stop(self) -> None:
        """End the engine."""
        ...


class InstanceServer:
    """One incarnation of an instance. All methods are called on one event loop; those of `member.Member` are here.

    Args:
        incarnation: Its number.
        supervisor: Keeps its engine running.
        spool: Of this incarnation.
        log: Where the engine's log is, for people.
        clock: Seconds.
    """

    def __init__(
        self,
        incarnation: int,
        supervisor: Supervisor,
        spool: Spool,
        *,
        log: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._incarnation, self._supervisor, self._spool, self._log = incarnation, supervisor, spool, log
        self._clock = clock
        self._lines = EngineLines(spool.add, self._died)
        self._deaths: list[EngineDeath] = []
        self._num_deaths = 0
        self._tokens_of_dead: deque[Tokens] = deque()
        self._tokens_at = clock()
        self._news = asyncio.Event()
        self._reported: object = None
        self._reported_stats: EngineStats | None = None
        self._supervising: asyncio.Task[None] | None = None
        self._is_stopping = False
        self._engine = PreparedEngine(supervisor, self._news.set)
        self._calls = HttpCalls(lambda: supervisor.endpoints() if self._engine.current() is not None else None)
        spool.on_news = self._news.set
        spool.on_lost = lambda key, why: self._note_death(why, ANSWER_LOST, (key,))

    def start(self) -> None:
        """Start the engine."""
        self._supervising = self._supervisor.start()

    # The member's methods.

    async def submit(self, lot: Lot) -> bool:
        """Take lines, or return False where no engine is ready."""
        engine = self._engine.current()
        if engine is None or self._lines.is_dead(engine) or self._is_stopping:
            return False
        for line in lot.lines:
            known = self._lines.get(line.key)
            if known is not None:
                known.resend = True  # a server that was started again has none of its tokens
            elif self._spool.holds(line.key):
                self._spool.again(line.key)
            else:
                self._lines.start(engine, line)
        return True

    async def poll(self, poll: Poll) -> Report:
        """Return what is new: at once if there is something, else after `wait_s`.

        Answers are acknowledged up to the number `after_answer`, with which the poll says what it has received.
        """
        self._spool.acknowledge(poll.acknowledged, poll.after_answer)
        self._deaths = [one for one in self._deaths if one.number > poll.after_death]
        until = self._clock() + poll.wait_s
        while True:
            self._news.clear()
            report = await self._report(poll)
            state = (report.phase, report.message, report.restarts)
            if report.answers or report.deaths or report.tokens or state != self._reported or self._clock() >= until:
                self._reported = state
                return report
            try:
                await asyncio.wait_for(self._news.wait(), min(_LOOK_EVERY_S, max(0.0, until - self._clock())))
            except TimeoutError:
                continue

    async def take_back(self, count: int, among: tuple[str, ...] = ()) -> tuple[str, ...]:
        """Abort up to so many lines that the engine has not begun, the last ones first; or those of `among`.

        Returns their keys. The engine says how many it has not begun; with an order policy of its own these need not
        be the last ones. As many as it takes into a prefill pass stay: before it hears of the abort, it begins them.
        """
        if among:
            return self._lines.give_up(among)
        engine = self._engine.current()
        if engine is None:
            return ()
        try:
            stats = await asyncio.wait_for(engine.stats(), _COUNT_WITHIN_S)
        except (EngineError, TimeoutError):
            return ()
        queued = stats.sequences.get("QUEUED", 0)
        return self._lines.take_back(max(0, min(count, queued - _begun_at_once(stats, queued))))

    async def cancel(self, keys: tuple[str, ...]) -> None:
        """Abort lines."""
        self._lines.drop(keys)

    async def known(self) -> tuple[str, ...]:
        """Return the keys of the lines in flight. The caller knows nothing yet: the next report is given at once."""
        self._reported = self._reported_stats = None
        return self._lines.keys

    async def stats(self) -> Reading:
        """Read the statistics of the engine now."""
        engine, restarts = self._engine.current(), self._supervisor.state.restarts
        if engine is None:
            return Reading(restarts)
        try:
            return Reading(restarts, await engine.stats())
        except EngineError:
            return Reading(restarts)

    async def stop(self) -> None:
        """End the engine, and wait until the disk has all answers."""
        self._is_stopping = True
        self._engine.close()
        await self._supervisor.stop()
        await self._spool.close(_SPOOL_WITHIN_S)

    # SGLang's endpoints.

    async def http(self, request: HttpRequest) -> HttpPart:
        """Send a request to the engine, and return the first part of its answer."""
        return await self._calls.begin(request)

    async def http_more(self, asked: HttpMore) -> HttpPart:
        """Return another part of an answer."""
        return await self._calls.more(asked)

    async def http_end(self, call: str) -> None:
        """Abort a request, or forget one whose answer is read."""
        self._calls.end(call)

    async def adopt(self, state: ServiceState) -> None:
        """Give all engines the state of the service before they take lines."""
        self._engine.adopt(state)

    async def control(self, control: Control) -> Controlled:
        """Send the engine a request that controls it."""
        return await self._engine.control(control)

    # What engines give.

    def _died(self, death: EngineError, lines: list[LineInFlight]) -> None:
        tokens = (line.take_tokens() for line in lines)
        self._tokens_of_dead.extend(one for one in tokens if one is not None)
        code = STOPPED if self._is_stopping else death.code
        self._note_death(f"{death}; its log is {self._log}", code, tuple(line.key for line in lines))

    def _note_death(self, message: str, code: str | None, keys: tuple[str, ...]) -> None:
        self._num_deaths += 1
        self._deaths.append(EngineDeath(self._num_deaths, message, code, keys))
        self._news.set()

    # Reports.

    async def _report(self, poll: Poll) -> Report:
        answers = await self._spool.unacknowledged(poll.after_answer, _ANSWER_BYTES)
        tokens = self._new_tokens()
        engine, state = self._engine.current(), self._state()
        facts = None
        if engine is not None:
            facts = EngineFacts(tuple(engine.served_model_names), state.forward or "", engine.plan_rates)
        return Report(
            incarnation=self._incarnation,
            phase=state.phase,
            message=self._message(state),
            restarts=state.restarts,
            facts=facts,
            answers=answers,
            # The tokens of its lines come first: with the death, the lines go elsewhere.
            deaths=() if self._tokens_of_dead else tuple(one for one in self._deaths if one.number > poll.after_death),
            tokens=tokens,
            in_flight=len(self._lines),
            stats=self._new_stats(),
        )

    def _new_stats(self) -> EngineStats | None:
        """Return the statistics of the engine if they were not reported yet: they come once a second."""
        stats, before = self._supervisor.view.stats, self._reported_stats
        self._reported_stats = stats
        return None if stats is before else stats

    def _new_tokens(self) -> tuple[Tokens, ...]:
        found: list[Tokens] = []
        left = _TOKEN_BYTES
        while self._tokens_of_dead and left > 0:
            found.append(self._tokens_of_dead.popleft())
            left -= len(found[-1].tokens)
        if self._clock() - self._tokens_at >= _TOKENS_EVERY_S:
            self._tokens_at = self._clock()
            for line in self._lines:
                if left <= 0:
                    break
                tokens = line.take_tokens()
                if tokens is not None:
                    found.append(tokens)
                    left -= len(tokens.tokens)
        return tuple(found)

    def _state(self) -> EngineState:
        """Return the state of the engine, also where its supervisor has ended by a fault of the program."""
        state, ended = self._supervisor.state, self._supervising
        fault = ended.exception() if ended is not None and ended.done() and not ended.cancelled() else None
        unprepared = self._engine.phase
        if fault is None and unprepared is not None:
            return replace(state, phase=unprepared[0], message=unprepared[1])
        if fault is None:
            return state
        message = f"the supervisor of the engine failed: {type(fault).__name__}: {fault}"
        return EngineState(phase="failed", message=message, since=state.since, restarts=state.restarts)

    def _message(self, state: EngineState) -> str | None:
        messages = [] if state.message is None else [f"{state.message}; its log is {self._log}"]
        if self._spool.message is not None:
            messages.append(self._spool.message)
        return "; ".join(messages) or None


def _begun_at_once(stats: EngineStats, queued: int) -> int:
    """Return how many sequences the ranks of an engine begin together in a pass, on average; 0 before the first."""
    passes = stats.counters.get("prefill_groups", 0)
    ended = stats.counters.get("sequences_finished", 0) + stats.counters.get("sequences_aborted", 0)
    begun = ended + sum(stats.sequences.values()) - queued
    return math.ceil(begun / passes * max(1, len(stats.ranks))) if passes else 0
