"""Owns what a pool knows of one instance: its lines, its last report, and how fast it is."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field

from sgl_batch.control_plane.instances.answer_rate import AnswerRate
from sgl_batch.control_plane.instances.member import Member, MemberLostError
from sgl_batch.control_plane.instances.messages import EngineFacts, Poll, Reading, Report
from sgl_batch.control_plane.instances.pool_line import PoolLine
from sgl_batch.control_plane.instances.quarantine import SuspectGroup
from sgl_batch.control_plane.instances.shares import Load
from sgl_batch.control_plane.instances.summed_stats import InstanceStats

READY = ("ready", "stalled")
_COMING = ("starting", "restarting", "updating")
# After so long an engine has counted all lines that it was given, and the count is here.
_COUNTED_AFTER_S = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberView:
    """An instance for people.

    `phase`: of its engine, or draining. `lines_per_s`: 0 where it is not known yet.
    """

    name: str
    incarnation: int
    node: str
    phase: str
    message: str | None
    restarts: int
    in_flight: int
    answered: int
    lines_per_s: float


@dataclass(slots=True, eq=False, kw_only=True)
class Seat:
    """The place of one incarnation of an instance in a pool.

    Attributes:
        member: The instance.
        rate: How fast it answers.
        introduced: Whether it has reported all that it had when it joined.
        given: The lines that it has, by key.
        reserved: Lines that it is to get next, before those that wait for any instance.
        group: The suspects that it runs alone.
        given_at: When it got lines last.
        unwanted: Keys of lines that were cancelled; `to_cancel` are those that it has not heard of.
        committed: Keys of answers that it need not keep, since the last poll; `sent` went with that.
        wake: Set when it may get lines.
        empty: Set while it has no line.
    """

    member: Member
    rate: AnswerRate
    phase: str = "starting"
    message: str | None = None
    restarts: int = 0
    answered: int = 0
    draining: bool = False
    introduced: bool = True
    facts: EngineFacts | None = None
    given: dict[str, PoolLine] = field(default_factory=dict)
    given_at: float = 0.0
    reserved: list[PoolLine] = field(default_factory=list)
    group: SuspectGroup | None = None
    unwanted: set[str] = field(default_factory=set)
    to_cancel: list[str] = field(default_factory=list)
    committed: list[str] = field(default_factory=list)
    sent: tuple[str, ...] = ()
    stats: InstanceStats = field(default_factory=InstanceStats)
    after_answer: int = 0
    after_death: int = 0
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    empty: asyncio.Event = field(default_factory=asyncio.Event)
    tasks: list[asyncio.Task[None]] = field(default_factory=list)

    @property
    def is_ready(self) -> bool:
        """Whether its engine takes lines."""
        return self.phase in READY

    @property
    def sure_rate(self) -> float:
        """Lines that it answers a second; 0 where too few are answered to compare it."""
        return self.rate.lines_per_s if self.rate.is_certain else 0.0

    @property
    def is_coming(self) -> bool:
        """Whether its engine takes lines soon, but not yet."""
        return self.phase in _COMING and not self.draining

    def poll(self, wait_s: float) -> Poll:
        """Return what to ask it next, with the answers that it need not keep."""
        self.sent, self.committed = tuple(self.committed), []
        return Poll(after_answer=self.after_answer, after_death=self.after_death, wait_s=wait_s, acknowledged=self.sent)

    def see(self, report: Report, now: float) -> None:
        """Take in its state, but not the answers, the tokens and the deaths."""
        self.rate.note(now, answered=len(report.answers), was_busy=bool(self.given or report.answers))
        self.answered += len(report.answers)
        self.phase, self.message, self.restarts = report.phase, report.message, report.restarts
        self.facts = report.facts or self.facts
        self.see_stats(report)

    def see_stats(self, read: Report | Reading) -> None:
        """Take in statistics, where there are any."""
        if read.stats is not None:
            self.stats.see(read.stats, read.restarts)

    async def read_stats(self) -> Reading | None:
        """Read the statistics of its engine now; None where the instance is gone."""
        with suppress(MemberLostError):
            return await self.member.stats()
        return None

    def load(self, now: float) -> Load:
        """Return what it has to do, as its last report says."""
        queued = min(self.stats.queued, len(self.given))
        is_counted = now - self.given_at >= _COUNTED_AFTER_S
        movable = sum(not one.has_moved for one in self.given.values())
        return Load(lines=len(self.given), queued=queued, is_counted=is_counted, movable=movable, rate=self.sure_rate)

    def spared(self, queued: int) -> set[str]:
        """Return the keys of lines that are not suspected of its engine's death: it had most likely not begun them.

        A line is spared once. One that kills engines before they have counted it is suspected the next time.
        """
        waiting = [line for line in self.given.values() if not len(line.partial_output)]
        found = [line for line in waiting[max(0, len(waiting) - queued) :] if not line.was_spared]
        for line in found:
            line.was_spared = True
        return {line.key for line in found}

    def movable(self, count: int) -> tuple[str, ...]:
        """Return the keys of up to so many lines that have not moved yet, those with the fewest tokens first."""
        lines = sorted(
            (one for one in self.given.values() if not one.has_moved), key=lambda one: len(one.partial_output)
        )
        return tuple(one.key for one in lines[:count])

    def give(self, lines: Iterable[PoolLine], now: float) -> None:
        """Note lines as its own."""
        self.given_at = now
        self.given.update((line.key, line) for line in lines)
        if self.given:
            self.empty.clear()

    def take(self, key: str) -> PoolLine | None:
        """Return a line that it does not have any more, or None where it had none of this key."""
        line = self.given.pop(key, None)
        if not self.given and not self.reserved:
            self.empty.set()
        return line

    def take_all(self) -> list[PoolLine]:
        """Return all lines that wait for an answer of it; it has none any more."""
        found = [line for line in [*self.given.values(), *self.reserved] if not line.answer.done()]
        self.given.clear()
        self.reserved.clear()
        self.empty.set()
        return found

    def view(self) -> MemberView:
        """Return it for people."""
        return MemberView(
            name=self.member.name,
            incarnation=self.member.incarnation,
            node=self.member.node,
            phase="draining" if self.draining else self.phase,
            message=self.message,
            restarts=self.restarts,
            in_flight=len(self.given),
            answered=self.answered,
            lines_per_s=self.rate.lines_per_s,
        )
