"""Owns a simulated instance: ranks in lockstep whose decisions are those of core/, in modelled time.

Time jumps from event to event: between two boundaries decode steps are added together up to the next one in which a
sequence ends, KV comes back, or a request arrives.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from sgl_batch.core import growth
from sgl_batch.core.actions import Action, BeginInterval, Idle, Join, Prefill, Refill, Step
from sgl_batch.core.ended_lengths import EndedLengths
from sgl_batch.core.group_decider import GroupDecider
from sgl_batch.core.plan import Plan
from sgl_batch.core.rank_agreement import GroupDecision, RankHeader, StepKind, next_step
from sgl_batch.core.rank_moves import Migration
from sgl_batch.planner.pass_cost import COPIES, PassTime
from sgl_batch.planner.roofline import OVERHEAD
from sgl_batch.simulator.decode_group import NEVER
from sgl_batch.simulator.node_pool import NodePool
from sgl_batch.simulator.partition import SetCosts, TailForms, fullest_tokens, into_sets, stragglers
from sgl_batch.simulator.passes import PLAIN, RankPass, pass_time, together
from sgl_batch.simulator.rank import Prompts, SimulatedRank
from sgl_batch.simulator.scheduler import Ours, Scheduler
from sgl_batch.simulator.timeline import Account, Partitioned
from sgl_batch.simulator.work import PARTITION, Costs, PassWork

# Called with the time when sequences arrive, and when others have ended, whose room they may take. Gives the ranks the
# sequences that have arrived, and returns the time of the next ones.
Arrivals = Callable[[float], float]


def no_arrivals(now: float) -> float:
    """Say that no sequence arrives later."""
    return math.inf


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
        pool: Deals what waits to the ranks of a node, at boundaries on which they agree; None where ranks keep it.
        long_tail: What is compared for the last sequences; None where they stay as they are.

    ranks: those given and, after a partition, the sets as well.
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
        pool: NodePool | None = None,
        long_tail: TailForms | None = None,
    ) -> None:
        self.ranks, self.plan, self.account = list(ranks), plan, Account()
        self._active, self._pool, self._long_tail, self._has_crossed = self.ranks, pool, long_tail, False
        self._scheduler, self._costs, self._arrivals = scheduler, costs, arrivals
        self._decider = GroupDecider(migration)
        self._first_use, self._next_arrival, self._ended = first_use, arrivals(0.0), 0
        self._ended_lengths = EndedLengths()
        self._until = math.inf
        # By rank, how often it had changed when it decided to go on with plain steps.
        self._steady, self._holds_back = [-1] * len(ranks), False
        self._headers: list[RankHeader | None] = [None] * len(ranks)

    @property
    def now(self) -> float:
        """Return the modelled time, in seconds from the start."""
        return self.account.seconds

    def feed(self, arrivals: Arrivals) -> None:
        """Take sequences from `arrivals` from now on; as more may come at any time, none are then the last."""
        self._arrivals, self._next_arrival, self._long_tail = arrivals, arrivals(self.now), None

    def run(self, until: float = math.inf) -> Account:
        """Run until all sequences have ended, or the time has come, to within a step or a prefill group."""
        self._until = until
        while self.now < until:
            self._arrive()
            if self._has_crossed:
                self._has_crossed = False
                self._partition_if_it_pays()
            together = len(self._active) > 1 and not self._scheduler.is_local
            advanced = self._agreed_step() if together else self._own_steps()
            if advanced:
                continue
            if all(rank.is_empty for rank in self._active) and math.isinf(self._next_arrival):
                break
            self._wait_for_event()
        return self.account

    def _arrive(self) -> None:
        for rank in self._active:
            rank.now = self.now
        if self._arrivals is no_arrivals:
            return
        ended = sum(rank.tally.finished for rank in self._active)
        if self._next_arrival <= self.now or ended != self._ended:
            self._next_arrival, self._ended = self._arrivals(self.now), ended
            self._headers = [None] * len(self._active)

    def _wait_for_event(self) -> None:
        """Let time pass to the next event, where no rank has anything to compute."""
        coming = min(rank.returning.next_at for rank in self._active)
        at = min(coming, self._next_arrival)
        assert math.isfinite(at), "ranks idle though sequences wait"
        self.account.wait(max(at - self.now, 0.0), COPIES if coming <= self._next_arrival else "arrivals")

    # One rank, or ranks that decide by themselves.

    def _own_steps(self) -> bool:
        """Let each rank decide what it does next, and run the pass of all. Returns whether there was one."""
        self._holds_back = self._scheduler.meet(self._active)
        passes = [self._own_step(number, rank) for number, rank in enumerate(self._active)]
        if not any(one is not None for one in passes):
            return False
        self._run(passes)
        return True

    def _own_step(self, number: int, rank: SimulatedRank) -> RankPass | None:
        """Return the pass that a rank decides on. A plain step stays its decision while nothing changes."""
        unchanged = self._steady[number] == rank.changes and rank.running and not rank.arrived
        if unchanged and not self._holds_back and rank.steps_to_boundary > 0:
            return PLAIN
        self._steady[number] = -1
        while True:
            for action in self._scheduler.next(rank.state(), rank.kv_state(), self.plan):
                match action:
                    case Step(prefill=(), decode=None):
                        self._steady[number] = rank.changes
                        return PLAIN
                    case Step(prefill=chunks, decode=decode):
                        whole = [chunk.sequence for chunk in chunks]
                        prompts = [rank.compute(chunk) for chunk in chunks]
                        done = [one for one in whole if one is not rank.begun]
                        return RankPass(together(prompts), done, decodes=decode is None)
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
        return RankPass(together([*parts, rank.prefill(action)]), whole, decodes=False)

    def _do(self, rank: SimulatedRank, action: Action) -> None:
        if isinstance(action, BeginInterval) and len(self._active) == 1:
            self._crossed()
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
        for number, rank in enumerate(self._active):
            if rank.arrived:
                rank.join_arrived()
                self._headers[number] = None
        headers = [known or rank.header() for known, rank in zip(self._headers, self._active, strict=True)]
        self._headers = list(headers)
        step = next_step(headers, self.plan)
        if step.kind is StepKind.IDLE:
            return False
        if step.kind is StepKind.BOUNDARY:
            return self._boundary(others_run=step.any_rank_decodes)
        self._run([RankPass(Prompts(), [], decodes=True) for _ in self._active])
        return True

    def _boundary(self, *, others_run: bool) -> bool:
        self._headers = [None] * len(self._active)
        if self._pool is not None:
            self._pool.deal(self._active, self.plan)
        for rank in self._active:
            for action in growth.extend_running(rank.kv_state(), self.plan) if rank.form.admission.policy.grows else ():
                self._do(rank, action)
        movable = self._may_move()
        states = [rank.rank_state(movable=movable) for rank in self._active]
        decision = self._decider.decide(states, self.plan)
        if decision.prefill:
            self._run(
                [
                    self._prefill(rank, action)
                    if isinstance(action, Prefill)
                    else RankPass(Prompts(), [], decodes=False)
                    for rank, (action,) in zip(self._active, decision.actions, strict=True)
                ]
            )
            return True
        self._migrate(decision)
        runs = others_run
        for rank, (*_, action) in zip(self._active, decision.actions, strict=True):
            if rank.form.policy.is_local:
                self._cross_boundary(rank, others_run=others_run)
            else:
                if isinstance(action, Refill):
                    rank.refill(rank.ready[sequence.sequence_id] for sequence in action.sequences)
                rank.begin_interval()
            runs |= bool(rank.running)
        if runs:
            self._crossed()
        return runs

    def _may_move(self) -> bool:
        """Return whether a decision may move sequences; if not, it need not see which ones can leave a rank.

        To a rank with a queue sequences move only instead of a prefill, from ranks that cannot run all that they have.
        """
        if self._decider.migration is Migration.NEVER:
            return False
        most = self.plan.decode.b_moe
        return not all(rank.queue for rank in self._active) or any(
            rank.ready and rank.resident > most for rank in self._active
        )

    def _crossed(self) -> None:
        """Let the time of a boundary pass, which all ranks have crossed together."""
        self._has_crossed = True
        time = self._costs.of_boundary()
        if time.seconds:
            self.account.add(time, running=sum(len(rank.running) for rank in self._active))

    def _cross_boundary(self, rank: SimulatedRank, *, others_run: bool) -> None:
        before = rank.boundaries
        while rank.boundaries == before:
            policy = rank.form.policy
            for action in policy.at_boundary(rank.state(), rank.kv_state(), self.plan, others_run=others_run):
                self._do(rank, action)

    def _migrate(self, decision: GroupDecision) -> None:
        moved = [0] * len(self._active)
        leaving = []
        for move in decision.moves:
            source = self._active[move.source]
            sequence = source.ready.get(move.sequence_id) or source.running[move.sequence_id]
            is_free = self._pool is not None and self._pool.is_free(move, source)
            source.depart(sequence)
            leaving.append((move.target, sequence, is_free))
            moved[move.source] += 0 if is_free else sequence.kv_tokens
        for target, sequence, is_free in leaving:
            self._active[target].adopt(sequence, moved=not is_free)
        if any(moved):
            self.account.add(self._costs.of_move(max(moved)))

    # The long tail.

    def _partition_if_it_pays(self) -> None:
        """Let the last sequences go on in sets of ranks, if they then end sooner as far as can be known."""
        tail, ranks = self._long_tail, self._active
        if tail is None or math.isfinite(self._next_arrival) or any(rank.has_waiting for rank in ranks):
            return
        for rank in ranks:
            for length in rank.take_ended():
                self._ended_lengths.add(length)
        running = stragglers(ranks)
        streams = ranks[0].form.streams
        sets = tail.compared.best(running, self._ended_lengths, self.plan, streams=streams) if running else None
        if sets is None:
            return
        if streams:
            self.account.add(self._costs.of_copy(fullest_tokens(ranks)))
        alike = tail.compared.alike
        self.account.partitioned = Partitioned(at_s=self.now, sequences=len(running) * alike, ranks=sets.ranks)
        self._active = into_sets(ranks, sets, self.plan, alike=alike)
        self._costs = SetCosts(tail.costs[sets.ranks], sets.ranks if alike > 1 else 1)
        self.account.add(PassTime.of(PARTITION, tail.compared.change_s, OVERHEAD), running=0)
        self.account.add(self._costs.of_move(fullest_tokens(self._active)))
        self.ranks += self._active
        self._scheduler = Ours(self._active[0].form.policy)
        self._headers, self._steady = [None] * len(self._active), [-1] * len(self._active)
        self._pool = self._long_tail = None

    # Passes.

    def _run(self, passes: Sequence[RankPass | None]) -> None:
        """Run one pass of all ranks, or as many equal decode steps as pass until something changes."""
        prefills = any(one is not None and one.prompts.tokens for one in passes)
        decoding = [one is not None and one.decodes for one in passes]
        kv, rows = self._decoded(decoding)
        steps = 1 if prefills or self._holds_back else self._equal_steps(decoding, kv, rows)
        time, busy = pass_time(self._active, passes, decoding, steps, self._costs)
        total = sum(rows)
        running = sum(len(rank.running) for rank in self._active)
        seconds = self.account.add(time, times=steps, running=running, busy=busy, prefill=not total)
        self.account.rows += steps * total
        self.account.steps += steps if total else 0
        self.account.groups += prefills
        for number, (rank, one) in enumerate(zip(self._active, passes, strict=True)):
            if one is None:
                continue
            if one.decodes:
                if rank.group.steps_to_end() <= steps or one.whole:
                    self._headers[number] = None
                rank.decode(steps, seconds)
            if one.whole:
                rank.prefilled(one.whole)
        if self._first_use is not None and (new := sum(rank.newly_in_memory() for rank in self._active)):
            self.account.add(self._first_use(new))
        if any(rank.steps_to_boundary <= 0 for rank in self._active):
            self._headers = [None] * len(self._active)

    def _decoded(self, decoding: Sequence[bool]) -> tuple[list[int], list[int]]:
        kv = [rank.kv_tokens if on else 0 for rank, on in zip(self._active, decoding, strict=True)]
        return kv, [len(rank.running) if on else 0 for rank, on in zip(self._active, decoding, strict=True)]

    def _equal_steps(self, decoding: Sequence[bool], kv: Sequence[int], rows: Sequence[int]) -> int:
        """Return the steps until a sequence ends, a boundary is due, KV comes back, a request arrives or time is up."""
        ranks = [rank for rank, on in zip(self._active, decoding, strict=True) if on and rank.running]
        steps = min((min(rank.group.steps_to_end(), rank.steps_to_boundary) for rank in ranks), default=1)
        event = min([self._until, self._next_arrival, *(rank.returning.next_at for rank in self._active)])
        if steps > 1 and math.isfinite(event):
            busiest = max(range(len(kv)), key=kv.__getitem__)
            streams = self._active[busiest].form.streams
            work = PassWork(rows=rows[busiest], kv_tokens=kv[busiest], all_rows=sum(rows), streams=streams)
            one = self._costs.of_pass(work)
            steps = min(steps, max(1, math.ceil((event - self.now) / max(one.seconds, 1e-9))))
        assert 0 < steps < NEVER, "a step has rows"
        return steps
