"""Owns the lines of all instances: one `LineEngine` for jobs, whose lines any instance answers.

It knows no Ray, and no jobs. What an instance is given, and what changes its instance, is decided in `shares`; which
lines run alone, in `quarantine`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import suppress

from sgl_batch.control_plane.instances.answer_rate import AnswerRate
from sgl_batch.control_plane.instances.line_table import LineTable
from sgl_batch.control_plane.instances.member import Member, MemberLostError
from sgl_batch.control_plane.instances.messages import OUTDATED, EngineDeath, Lot, Report
from sgl_batch.control_plane.instances.pool_line import PoolLine
from sgl_batch.control_plane.instances.quarantine import Quarantine
from sgl_batch.control_plane.instances.seat import MemberView, Seat
from sgl_batch.control_plane.instances.shares import lot_lines, most_lines, moves
from sgl_batch.control_plane.instances.summed_stats import summed
from sgl_batch.core.answers import EngineStats, LineResponse
from sgl_batch.core.partial_output import PartialOutput, unpack
from sgl_batch.core.plan_rates import PlanRates
from sgl_batch.engine.line_frames import pack_body
from sgl_batch.errors import EngineError
from sgl_batch.jobs.batch_service.settings import DEFAULT_MAX_IN_FLIGHT
from sgl_batch.jobs.result_lines import engine_crashed_response

logger = logging.getLogger(__name__)

_POLL_WAIT_S = 1.0
# Between two polls, and after a small lot: answers and lines that come meanwhile go together. An instance with many
# lines answers many at once, and is asked less often: each poll takes milliseconds of its cores.
_PAUSE_S, _LONG_PAUSE_S = 0.1, 0.5
_SMALL_LOT = 64
# An engine in a long pass answers late: then its last report counts.
_READ_WITHIN_S = 2.0

Lost = Callable[[Member, str], None]
Prepare = Callable[[Member], Awaitable[None]]


def _ignore(member: Member, reason: str) -> None:
    pass


async def _as_it_is(member: Member) -> None:
    pass


class InstancePool:
    """All instances as one engine, which never dies: lines wait while no instance is ready.

    All methods are called on one event loop.

    Args:
        depth: The most lines that an instance has at a time.
        on_lost: Called with a member that was found gone, and why, once the pool has left it.
        prepare: Called with a member before it is asked whether it takes lines.
        clock: Seconds.
    """

    def __init__(
        self,
        *,
        depth: int = DEFAULT_MAX_IN_FLIGHT,
        on_lost: Lost = _ignore,
        prepare: Prepare = _as_it_is,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._depth, self._clock = depth, clock
        self.on_lost, self._prepare = on_lost, prepare
        self._seats: list[Seat] = []
        self._table = LineTable()
        self._waiting: deque[PoolLine] = deque()
        self._is_waking = False
        self._quarantine = Quarantine()
        self._gone = EngineStats()
        self._names: tuple[str, ...] = ()
        self._moving: asyncio.Task[None] | None = None
        self._changed = asyncio.Condition()
        self._failure: EngineError | None = None

    # The LineEngine.

    @property
    def served_model_names(self) -> tuple[str, ...]:
        """The names of the model that the instances serve."""
        return self._names

    @property
    def plan_rates(self) -> PlanRates | None:
        """What the plans of the ready instances predict together; None where one predicts nothing."""
        found = [one.facts.plan_rates if one.facts else None for one in self._ready()]
        rates = [one for one in found if one is not None]
        if not rates or len(rates) < len(found):
            return None
        return PlanRates(
            prompt_tokens_per_s=sum(one.prompt_tokens_per_s for one in rates),
            output_tokens_per_s=sum(one.output_tokens_per_s for one in rates),
            step_s=max(one.step_s for one in rates),
        )

    async def respond(
        self, url: str, body: Mapping[str, object], partial_output: PartialOutput | None = None
    ) -> LineResponse:
        """Answer one request by any instance. Cancelling the call aborts it.

        Raises EngineError after `fail`. The death of an instance is not raised: the line goes on elsewhere.
        """
        if self._failure is not None:
            raise EngineError(str(self._failure), code=self._failure.code)
        line = self._table.open(url, pack_body(body), PartialOutput() if partial_output is None else partial_output)
        if not line.answer.done():
            self._enqueue(line)
        is_wanted = False
        try:
            response = await line.answer
            is_wanted = True
            return response
        finally:
            self._table.close(line, is_wanted=is_wanted)
            if not is_wanted:
                self._abort(line.key)

    async def stats(self) -> EngineStats:
        """Return the statistics of all instances that there have been, read now where an engine answers soon.

        The readings are seen together, at the end: a report that comes in between may be older than a reading.
        """
        reading = {asyncio.ensure_future(seat.read_stats()): seat for seat in self._seats if seat.is_ready}
        if reading:
            read, late = await asyncio.wait(reading, timeout=_READ_WITHIN_S)
            for one in late:
                one.cancel()
            for one in read:
                found = one.result()
                if found is not None:
                    reading[one].see_stats(found)
        return self.reported_stats()

    def reported_stats(self) -> EngineStats:
        """Return the statistics of all instances that there have been, as they last reported them."""
        return summed([self._gone, *(one.stats.total() for one in self._seats)])

    def acknowledge(self, request_ids: Iterable[str]) -> None:
        """Say that these answers are committed: no instance need keep them any more."""
        self._table.acknowledge(request_ids)

    # The EngineSource.

    def current(self) -> InstancePool | None:
        """Return the pool while an instance is ready, else None."""
        return self if self._ready() else None

    async def available(self, other_than: object | None = None) -> InstancePool:
        """Wait until an instance is ready."""
        async with self._changed:
            await self._changed.wait_for(lambda: bool(self._ready()))
        return self

    # Instances.

    def join(self, member: Member, *, from_before: bool = False) -> None:
        """Use an instance from now on.

        `from_before`: it may have answers and lines of an earlier server; no instance gets lines until it has said so.
        """
        seat = Seat(member=member, rate=AnswerRate(self._clock()), introduced=not from_before)
        seat.empty.set()
        self._seats.append(seat)
        seat.tasks = [asyncio.ensure_future(self._guard(seat, work)) for work in (self._watch(seat), self._feed(seat))]

    def leave(self, member: Member, reason: str) -> None:
        """Use an instance no more. Its lines go on elsewhere, from the tokens that it has reported. Idempotent."""
        seat = next((one for one in self._seats if one.member is member), None)
        if seat is None:
            return
        self._seats.remove(seat)
        for task in seat.tasks:
            task.cancel()
        self._gone = summed([self._gone, seat.stats.ended()])
        lines = seat.take_all()
        if lines:
            logger.warning("instance %s: %s; its %d lines go on elsewhere", member.name, reason, len(lines))
        if seat.group is not None:
            self._quarantine.put_back(seat.group)
            suspects = set(seat.group.lines)
            lines = [line for line in lines if line not in suspects]
        self._waiting.extendleft(reversed(lines))
        self._table.forget(seat)
        self._wake_all()

    async def drain(self, member: Member) -> None:
        """Give an instance no more lines; return when it has none. What it has not begun goes elsewhere at once."""
        seat = next((one for one in self._seats if one.member is member), None)
        if seat is None:
            return
        seat.draining = True
        self._release(seat)
        if any(not one.draining for one in self._seats):
            with suppress(MemberLostError):
                self._waiting.extend(await self._taken_back(seat, len(seat.given)))
        self._wake_all()
        if seat.given:
            await seat.empty.wait()

    def members(self) -> list[MemberView]:
        """Return the instances for people."""
        return [one.view() for one in self._seats]

    def all_members(self) -> list[Member]:
        """Return all instances, ready or not."""
        return [one.member for one in self._seats]

    def loads(self) -> list[tuple[Member, int]]:
        """Return the ready instances, and how many lines each has."""
        return [(one.member, len(one.given)) for one in self._ready()]

    def forget_old_weights(self) -> None:
        """Let no line go on from tokens that it has now, or get an answer that is here: they are of other weights."""
        self._table.forget_old_weights()

    def fail(self, error: EngineError) -> None:
        """Give up: there will be no instance any more. All lines raise this error."""
        self._failure = error
        self._table.fail(error)

    async def close(self) -> None:
        """Use no instance any more."""
        tasks = [task for seat in self._seats for task in seat.tasks]
        if self._moving is not None:
            tasks.append(self._moving)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._seats.clear()

    # Lines.

    def _enqueue(self, line: PoolLine) -> None:
        seat = self._table.computing(line.key)
        if seat is not None and not seat.draining:
            seat.reserved.append(line)
            seat.wake.set()
        else:
            self._waiting.append(line)
            if not self._is_waking:  # once for all lines that come together, however many instances there are
                self._is_waking = True
                asyncio.get_running_loop().call_soon(self._wake_all)

    def _abort(self, key: str) -> None:
        """Forget a line whose caller has gone: it is cancelled where it is."""
        for seat in self._seats:
            if seat.take(key) is not None:
                seat.unwanted.add(key)
                seat.to_cancel.append(key)
                seat.wake.set()

    def _ready(self) -> list[Seat]:
        return [one for one in self._seats if one.is_ready and not one.draining]

    def _wake_all(self) -> None:
        self._is_waking = False
        for seat in self._seats:
            seat.wake.set()

    # What instances get.

    async def _guard(self, seat: Seat, work: Awaitable[None]) -> None:
        """Do the work for one instance; leave it when it is gone."""
        try:
            await work
        except MemberLostError as error:
            self._lost(seat.member, str(error))

    def _lost(self, member: Member, reason: str) -> None:
        if any(one.member is member for one in self._seats):
            self.leave(member, reason)
            self.on_lost(member, reason)

    async def _feed(self, seat: Seat) -> None:
        while True:
            seat.wake.clear()
            if seat.to_cancel:
                keys, seat.to_cancel = tuple(seat.to_cancel), []
                await seat.member.cancel(keys)
            lines = self._next_lines(seat)
            if not lines:
                await seat.wake.wait()
                continue
            seat.give(lines, self._clock())
            if not await seat.member.submit(Lot(tuple(line.message() for line in lines))):
                seat.phase = "restarting"  # until its next report
                self._not_taken(seat, lines)
            elif len(lines) < _SMALL_LOT:
                await asyncio.sleep(_PAUSE_S)

    def _next_lines(self, seat: Seat) -> list[PoolLine]:
        """Return the lines that an instance gets now; none where it has to wait."""
        if not seat.is_ready or seat.draining or seat.group is not None:
            return []
        if not all(one.introduced for one in self._seats):
            return []
        if len(self._quarantine) and self._isolated() is seat:
            if seat.given:
                return []
            seat.group = self._quarantine.next()
            if seat.group is not None:
                return seat.group.wanted()
        lines, seat.reserved = seat.reserved, []
        room = self._most_lines(seat) - len(seat.given) - len(lines)
        for _ in range(lot_lines(len(self._waiting), len(self._ready()), room)):
            lines.append(self._waiting.popleft())
        return [line for line in lines if not line.answer.done()]

    def _most_lines(self, seat: Seat) -> int:
        unanswered = len(self._waiting) + sum(len(one.given) + len(one.reserved) for one in self._seats)
        rates = [one.sure_rate for one in self._seats if (one.is_ready and not one.draining) or one.is_coming]
        return most_lines(self._depth, unanswered, seat.sure_rate, rates)

    def _isolated(self) -> Seat:
        """Return the instance that runs the next suspects: the one with the fewest lines, if none runs some already.

        That is mostly the one whose engine has died, once it is back; meanwhile the others go on.
        """
        running = next((one for one in self._ready() if one.group is not None), None)
        candidates = [one for one in self._seats if one.is_coming or (one.is_ready and not one.draining)]
        return running or min(candidates, key=lambda one: len(one.given))

    def _release(self, seat: Seat) -> None:
        """Let lines go elsewhere that were to go to an instance next."""
        self._waiting.extendleft(reversed(seat.reserved))
        seat.reserved.clear()

    def _not_taken(self, seat: Seat, lines: list[PoolLine]) -> None:
        back = [line for line in lines if seat.take(line.key) is not None and not line.answer.done()]
        if seat.group is not None:
            self._quarantine.put_back(seat.group)
            seat.group = None
        else:
            self._waiting.extendleft(reversed(back))
        self._wake_all()

    # What instances report.

    async def _watch(self, seat: Seat) -> None:
        await self._prepare(seat.member)
        self._table.found(seat, await seat.member.known())
        while True:
            began = self._clock()
            report = await seat.member.poll(seat.poll(_POLL_WAIT_S))
            await self._take_in(seat, report)
            pause_s = _LONG_PAUSE_S if len(seat.given) > _SMALL_LOT else _PAUSE_S
            await asyncio.sleep(max(0.0, pause_s - (self._clock() - began)))

    async def _take_in(self, seat: Seat, report: Report) -> None:
        if report.incarnation != seat.member.incarnation:
            return
        was_ready, queued = seat.is_ready, seat.stats.queued
        seat.see(report, self._clock())
        seat.introduced = seat.introduced or not report.answers
        for update in report.tokens:
            if update.key in seat.given:
                seat.given[update.key].partial_output.put(update.start, unpack(update.tokens))
        for answered in report.answers:
            seat.after_answer = answered.number
            seat.take(answered.key)
            self._table.answered(seat, answered)
        for death in report.deaths:
            self._died(seat, death, queued)
        if seat.phase == OUTDATED:
            self._release(seat)
        if seat.group is not None and not seat.given and not seat.group.wanted():
            seat.group = None
        if seat.is_ready and not was_ready:
            self._names = seat.facts.served_model_names if seat.facts is not None else self._names
            async with self._changed:
                self._changed.notify_all()
        self._wake_all()
        if not self._waiting and self._moving is None:
            self._move()

    def _died(self, seat: Seat, death: EngineDeath, queued: int) -> None:
        """Take in a death. `queued`: how many lines the engine had not begun, at the last report before it."""
        seat.after_death = death.number
        logger.error("instance %s: its engine died with %d lines: %s", seat.member.name, len(death.keys), death.message)
        group, seat.group = seat.group, None
        spared = seat.spared(queued) if group is None and death.code is None else set()
        lines = [line for line in map(seat.take, death.keys) if line is not None and not line.answer.done()]
        if group is None and death.code is not None:
            self._waiting.extendleft(reversed(lines))
            return
        self._waiting.extendleft(line for line in reversed(lines) if line.key in spared)
        lines = [line for line in lines if line.key not in spared]
        for line in self._quarantine.died(group, lines, known=death.code is not None):
            line.answer.set_result(engine_crashed_response(line.key))

    # The end of a batch.

    def _move(self) -> None:
        """Let an instance that has much left give lines to one that soon has none to begin."""
        seats = [one for one in self._ready() if one.group is None]
        found = moves([one.load(self._clock()) for one in seats])
        if found is None or len(self._quarantine):
            return
        source, target = seats[found.source], seats[found.target]
        among = source.movable(found.count) if found.begun else ()
        if len(target.given) < self._depth // 2:
            self._moving = asyncio.ensure_future(
                self._guard(source, self._move_lines(source, target, found.count, among))
            )
            self._moving.add_done_callback(self._moved)

    def _moved(self, task: asyncio.Task[None]) -> None:
        self._moving = None
        if not task.cancelled():
            task.result()

    async def _move_lines(self, source: Seat, target: Seat, count: int, among: tuple[str, ...]) -> None:
        lines = await self._taken_back(source, count, among)
        for line in lines if among else ():
            line.has_moved = True
        if target in self._seats and not target.draining:
            target.reserved.extend(lines)
            target.wake.set()
        else:
            self._waiting.extend(lines)
            self._wake_all()

    async def _taken_back(self, seat: Seat, count: int, among: tuple[str, ...] = ()) -> list[PoolLine]:
        lines = [seat.take(key) for key in await seat.member.take_back(count, among)]
        return [line for line in lines if line is not None and not line.answer.done()]
