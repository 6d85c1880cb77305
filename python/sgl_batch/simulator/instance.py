"""Owns a simulated instance: ranks in lockstep whose decisions are those of core/, in modelled time.

Time jumps from event to event: between two boundaries decode steps are added together up to the next one in which a
sequence ends, KV comes back, or a request arrives.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sgl_batch.core import growth
from sgl_batch.core.actions import Action, Idle, Join, Prefill, Refill, Step
from sgl_batch.core.plan import Plan
from sgl_batch.core.rank_agreement import GroupDecision, Migration, RankHeader, StepKind, decide_group, next_step
from sgl_batch.core.sequence import SequenceState
from sgl_batch.planner.pass_cost import COPIES, PassTime
from sgl_batch.simulator.decode_group import NEVER
from sgl_batch.simulator.rank import Prompts, SimulatedRank
from sgl_batch.simulator.scheduler import Scheduler
from sgl_batch.simulator.timeline import Account
from sgl_batch.simulator.work import Costs, PassWork

# Called with the time when sequences arrive, and when others have ended, whose room they may take. Gives the ranks the
# sequences that have arrived, and returns the time of the next ones.
Arrivals = Callable[[float], float]


def no_arrivals(now: float) -> float:
    """Say that no sequence arrives later."""
    return math.inf


@dataclass(slots=True)
class RankPass:
    """What a rank does in a pass. `whole`: whose prompts it completes. `decodes`: whether its running ones, too."""

    prompts: Prompts
    whole: list[SequenceState]
    decodes: bool


class Instance:
    """Ranks in lockstep, in modelled time.

    Args:
        ranks: Of one model.
        plan: In force on all of them.
        scheduler: Decides for each rank, or with `is_local` false for one; several ranks of ours agree as in core/.
        costs: Of their passes and copies.
        arrivals: Gives later sequences to the ranks.
        first_use: Time in which memory is provided for KV of so many tokens that had none before; None for no time.
        migration: Which sequences may change their rank.
    """

    def __init__(
        self,
        ranks: Sequence[SimulatedRank],
        plan: Plan,
        scheduler: Scheduler,
        costs: Costs,
        *,
        arrivals: Arrivals = no_arrivals,
        first_use: Callable[[float], PassTime] | None = None,
        migration: Migration = Migration.EVEN,
    ) -> None:
        self.ranks, self.plan, self.account = ranks, plan, Account()
        self._scheduler, self._costs, self._arrivals, self._migration = scheduler, costs, arrivals, migration
        self._first_use, self._next_arrival, self._ended = first_use, arrivals(0.0), 0
        # By rank, how often it had changed when it decided to go on with plain steps.
        self._steady = [-1] * len(ranks)
        self._headers: list[RankHeader | None] = [None] * len(ranks)

    @property
    def now(self) -> float:
        """Return the modelled time, in seconds from the start."""
        return self.account.seconds

    def run(self, until: float = math.inf) -> Account:
        """Run until all sequences have ended, or the time has come."""
        together = len(self.ranks) > 1 and not self._scheduler.is_local
        while self.now < until:
            self._arrive()
            advanced = self._agreed_step() if together else self._own_steps()
            if advanced:
                continue
            if all(rank.is_empty for rank in self.ranks) and math.isinf(self._next_arrival):
                break
            self._wait_for_event()
        return self.account

    def _arrive(self) -> None:
        for rank in self.ranks:
            rank.now = self.now
        if self._arrivals is no_arrivals:
            return
        ended = sum(rank.tally.finished for rank in self.ranks)
        if self._next_arrival <= self.now or ended != self._ended:
            self._next_arrival, self._ended = self._arrivals(self.now), ended
            self._headers = [None] * len(self.ranks)

    def _wait_for_event(self) -> None:
        """Let time pass to the next event, where no rank has anything to compute."""
        coming = min(rank.returning.next_at for rank in self.ranks)
        at = min(coming, self._next_arrival)
        assert math.isfinite(at), "ranks idle though sequences wait"
        self.account.wait(max(at - self.now, 0.0), COPIES if coming <= self._next_arrival else "arrivals")

    # One rank, or ranks that decide by themselves.

    def _own_steps(self) -> bool:
        """Let each rank decide what it does next, and run the pass of all. Returns whether there was one."""
        passes = [self._own_step(number, rank) for number, rank in enumerate(self.ranks)]
        if not any(one is not None for one in passes):
            return False
        self._run(passes)
        return True

    def _own_step(self, number: int, rank: SimulatedRank) -> RankPass | None:
        """Return the pass that a rank decides on. A plain step stays its decision while nothing changes."""
        unchanged = self._steady[number] == rank.changes and rank.running and not rank.arrived
        if unchanged and rank.steps_to_boundary > 0:
            return _PLAIN
        self._steady[number] = -1
        while True:
            for action in self._scheduler.next(rank.state(), rank.kv_state(), self.plan):
                match action:
                    case Step(prefill=(), decode=None):
                        self._steady[number] = rank.changes
                        return _PLAIN
                    case Step(prefill=chunks, decode=decode):
                        whole = [chunk.sequence for chunk in chunks]
                        prompts = [rank.compute(chunk) for chunk in chunks]
                        done = [one for one in whole if one is not rank.begun]
                        return RankPass(_together(prompts), done, decodes=decode is None)
                    case Prefill():
                        return self._prefill(rank, action)
                    case Idle():
                        rank.begin_interval()
                        return None
                    case _:
                        self._do(rank, action)

    @staticmethod
    def _prefill(rank: SimulatedRank, action: Prefill) -> RankPass:
        parts, whole = [], [unit.leader for unit in action.units]
        if action.rest is not None:
            parts.append(rank.compute(action.rest))
            whole.append(action.rest.sequence)
        return RankPass(_together([*parts, rank.prefill(action)]), whole, decodes=False)

    def _do(self, rank: SimulatedRank, action: Action) -> None:
        if isinstance(action, Join):
            came = rank.join_arrived(wait=action.wait)
            self.account.wait(came - self.now, COPIES) if came > self.now else None
            rank.now = self.now
            return
        left, begun = rank.carry_out(action)
        if left:
            self.account.add(self._costs.of_copy(left))
            rank.now = self.now
        if begun:
            rank.returning.expect(self._costs.of_copy(begun).seconds, self.now)

    # Several ranks that agree.

    def _agreed_step(self) -> bool:
        for number, rank in enumerate(self.ranks):
            if rank.arrived:
                rank.join_arrived()
                self._headers[number] = None
        headers = [known or rank.header() for known, rank in zip(self._headers, self.ranks, strict=True)]
        self._headers = list(headers)
        step = next_step(headers, self.plan)
        if step.kind is StepKind.IDLE:
            return False
        if step.kind is StepKind.BOUNDARY:
            return self._boundary(others_run=step.any_rank_decodes)
        self._run([RankPass(Prompts(), [], decodes=True) for _ in self.ranks])
        return True

    def _boundary(self, *, others_run: bool) -> bool:
        self._headers = [None] * len(self.ranks)
        for rank in self.ranks:
            for action in growth.extend_running(rank.kv_state(), self.plan) if rank.form.admission.policy.grows else ():
                self._do(rank, action)
        may_move = self._migration is not Migration.NEVER and not all(rank.queue for rank in self.ranks)
        states = [rank.rank_state(movable=may_move) for rank in self.ranks]
        decision = decide_group(states, self.plan, self._migration)
        if decision.prefill:
            self._run(
                [
                    self._prefill(rank, action)
                    if isinstance(action, Prefill)
                    else RankPass(Prompts(), [], decodes=False)
                    for rank, (action,) in zip(self.ranks, decision.actions, strict=True)
                ]
            )
            return True
        self._migrate(decision)
        runs = others_run
        for rank, (*_, action) in zip(self.ranks, decision.actions, strict=True):
            if rank.form.policy.is_local:
                self._cross_boundary(rank, others_run=others_run)
            else:
                if isinstance(action, Refill):
                    rank.refill(rank.ready[sequence.sequence_id] for sequence in action.sequences)
                rank.begin_interval()
            runs |= bool(rank.running)
        return runs

    def _cross_boundary(self, rank: SimulatedRank, *, others_run: bool) -> None:
        before = rank.boundaries
        while rank.boundaries == before:
            policy = rank.form.policy
            for action in policy.at_boundary(rank.state(), rank.kv_state(), self.plan, others_run=others_run):
                self._do(rank, action)

    def _migrate(self, decision: GroupDecision) -> None:
        moved = [0] * len(self.ranks)
        leaving = []
        for move in decision.moves:
            source = self.ranks[move.source]
            sequence = source.ready.get(move.sequence_id) or source.running[move.sequence_id]
            source.depart(sequence)
            leaving.append((move.target, sequence))
            moved[move.source] += sequence.kv_tokens
        for target, sequence in leaving:
            self.ranks[target].adopt(sequence)
        if leaving:
            self.account.add(self._costs.of_move(max(moved)))

    # Passes.

    def _run(self, passes: Sequence[RankPass | None]) -> None:
        """Run one pass of all ranks, or as many equal decode steps as pass until something changes."""
        prefills = any(one is not None and one.prompts.tokens for one in passes)
        decoding = [one is not None and one.decodes for one in passes]
        kv, rows = self._decoded(decoding)
        steps = 1 if prefills else self._equal_steps(decoding, kv, rows)
        time, busy = self._time(passes, decoding, steps)
        total = sum(rows)
        running = sum(len(rank.running) for rank in self.ranks)
        seconds = self.account.add(time, times=steps, running=running, busy=busy, prefill=not total)
        self.account.rows += steps * total
        self.account.steps += steps if total else 0
        self.account.groups += prefills
        for number, (rank, one) in enumerate(zip(self.ranks, passes, strict=True)):
            if one is None:
                continue
            if one.decodes:
                if rank.group.steps_to_end() <= steps or one.whole:
                    self._headers[number] = None
                rank.decode(steps, seconds)
            if one.whole:
                rank.prefilled(one.whole)
        if self._first_use is not None and (new := sum(rank.newly_in_memory() for rank in self.ranks)):
            self.account.add(self._first_use(new))
        if any(rank.steps_to_boundary <= 0 for rank in self.ranks):
            self._headers = [None] * len(self.ranks)

    def _decoded(self, decoding: Sequence[bool]) -> tuple[list[int], list[int]]:
        kv = [rank.kv_tokens if on else 0 for rank, on in zip(self.ranks, decoding, strict=True)]
        return kv, [len(rank.running) if on else 0 for rank, on in zip(self.ranks, decoding, strict=True)]

    def _equal_steps(self, decoding: Sequence[bool], kv: Sequence[int], rows: Sequence[int]) -> int:
        """Return the steps until a sequence ends, a boundary is due, KV comes back or a request arrives."""
        ranks = [rank for rank, on in zip(self.ranks, decoding, strict=True) if on and rank.running]
        steps = min((min(rank.group.steps_to_end(), rank.steps_to_boundary) for rank in ranks), default=1)
        event = min([self._next_arrival, *(rank.returning.next_at for rank in self.ranks)])
        if steps > 1 and math.isfinite(event):
            busiest = max(range(len(kv)), key=kv.__getitem__)
            streams = self.ranks[busiest].form.streams
            work = PassWork(rows=rows[busiest], kv_tokens=kv[busiest], all_rows=sum(rows), streams=streams)
            one = self._costs.of_pass(work)
            steps = min(steps, max(1, math.ceil((event - self.now) / max(one.seconds, 1e-9))))
        assert 0 < steps < NEVER, "a step has rows"
        return steps

    def _time(self, passes: Sequence[RankPass | None], decoding: Sequence[bool], steps: int) -> tuple[PassTime, float]:
        """Return the time of the pass of the busiest rank, halfway through the steps, and the mean share of that."""
        works = []
        for rank, one, on in zip(self.ranks, passes, decoding, strict=True):
            prompts = Prompts() if one is None else one.prompts
            rows = len(rank.running) if on else 0
            works.append((prompts, rows, (rank.kv_tokens + rows * (steps - 1) // 2) if rows else 0))
        all_rows = sum(prompts.tokens + rows for prompts, rows, _ in works)
        load = [prompts.pairs + kv + _ROW_WEIGHT * (prompts.tokens + rows) for prompts, rows, kv in works]
        # The rank with the most rows and the one with the most tokens to look at are not always the same.
        busiest = {
            max(range(len(works)), key=load.__getitem__),
            max(range(len(works)), key=lambda number: works[number][0].tokens + works[number][1]),
        }
        times = [
            self._costs.of_pass(
                PassWork(
                    prompts=works[number][0].count,
                    prompt_tokens=works[number][0].tokens,
                    prompt_pairs=works[number][0].pairs,
                    rows=works[number][1],
                    kv_tokens=works[number][2],
                    all_rows=all_rows,
                    streams=self.ranks[number].form.streams,
                )
            )
            for number in busiest
        ]
        mean = sum(load) / len(load)
        return max(times, key=lambda time: time.seconds), mean / max(*load, 1)


_PLAIN = RankPass(Prompts(), [], decodes=True)
# How many tokens to look at cost as much as one row's weights, roughly: only which rank is the busiest depends on it.
_ROW_WEIGHT = 512


def _together(parts: Sequence[Prompts]) -> Prompts:
    return Prompts(
        count=sum(one.count for one in parts),
        tokens=sum(one.tokens for one in parts),
        pairs=sum(one.pairs for one in parts),
    )
