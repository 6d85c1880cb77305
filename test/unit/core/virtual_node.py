"""Owns ranks of one node without an engine: one inclusive store, and a device for each; every step is checked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from virtual_decider import VirtualDecider
from virtual_store import VirtualKV

from sgl_batch.core import growth
from sgl_batch.core.actions import (
    Action,
    BeginInterval,
    Extend,
    Grow,
    Idle,
    Join,
    Prefill,
    Restore,
    Suspend,
    Sync,
)
from sgl_batch.core.admission import Admission, arriving_pages, note_expected, reserve
from sgl_batch.core.admission_policy import AdmissionPolicy, Reserve
from sgl_batch.core.coroutine import Event, advance
from sgl_batch.core.kv_state import KVState
from sgl_batch.core.node_pool import device_room
from sgl_batch.core.page_boundary import State
from sgl_batch.core.page_ledger import PageLedger, pages_for
from sgl_batch.core.plan import Plan
from sgl_batch.core.primitives import combine, migrate, yield_
from sgl_batch.core.rank_agreement import RankHeader, StepKind, next_step, rank_is_due
from sgl_batch.core.rank_moves import Migration, Move
from sgl_batch.core.rank_state import Movable, RankState
from sgl_batch.core.sequence import SequenceState
from sgl_batch.core.store_policies import Inclusive
from sgl_batch.core.waiting_pool import enter_in_turn

_SLOTS = 1000


@dataclass(slots=True, kw_only=True)
class Job:
    """A sequence that arrives `at` a step on `rank`, and will generate `output` of at most `new` tokens."""

    at: int
    rank: int
    prompt: int
    new: int
    output: int
    stays: bool = False


@dataclass(slots=True, kw_only=True)
class NodeLog:
    """What happened. `ended`: by sequence, its last step. `rows`: by boundary, how many run on each rank after it."""

    steps: int = 0
    moved: int = 0
    suspended: int = 0
    ended: dict[str, int] = field(default_factory=dict)
    rows: list[list[int]] = field(default_factory=list)


class NodeRank:
    """One rank: its sequences, its device's account and its lease of the store."""

    def __init__(self, plan: Plan, *, device: int, share: int, store: int, admission: AdmissionPolicy) -> None:
        self.plan, self.policy = plan, Inclusive()
        self.device = PageLedger(device, plan.page_size)
        self.account = PageLedger(share, plan.page_size, policy=admission, pool_pages=store)
        self.kv = VirtualKV(self.account)
        self.queue: dict[str, SequenceState] = {}
        self.ready: dict[str, SequenceState] = {}
        self.running: list[SequenceState] = []
        self.returning: list[tuple[SequenceState, int]] = []
        self.steps = self.waits = 0
        self.changed = self.filling = False

    @property
    def sequences(self) -> list[SequenceState]:
        back = [one for one, _ in self.returning]
        return [*self.queue.values(), *self.ready.values(), *self.running, *back]

    def state(self) -> State:
        return State(
            queued=list(self.queue.values()),
            ready=list(self.ready.values()),
            running=len(self.running),
            steps=self.steps,
            request_slots=_SLOTS,
            free_request_slots=_SLOTS - len(self.sequences) + len(self.queue),
            filling=self.filling,
            changed=self.changed,
            returning=len(self.returning),
        )

    def kv_state(self) -> KVState:
        return KVState(
            device=self.device,
            admission=self.account,
            runners=lambda: self.running,
            estimate_shared=lambda _: None,
        )

    def rank_state(self, stays: Callable[[str], bool]) -> RankState:
        for one in self.queue.values():
            note_expected(Admission(leader=one), self.account.policy)
        kinds = (list(self.ready.values()), self.running)
        ready, running = ([self._item(one) for one in of if not stays(one.sequence_id)] for of in kinds)
        kv, use = self.kv_state(), self.kv.leased.use()
        room = device_room(kv, self.plan)
        return RankState.of(self.state(), self.account, None, (ready, running), store=use, device_room=room)

    def _item(self, one: SequenceState) -> Movable:
        pages = arriving_pages(one, self.account, self.plan)
        gap = self.account.whole_pages(one) - pages
        leased = self.account.held(one.sequence_id)
        return Movable(sequence=one, tokens=one.kv_tokens, pages=pages, gap=gap, leased=leased)

    def wait(self, one: SequenceState) -> None:
        self.waits += 1
        one.waits_since = self.waits
        self.ready[one.sequence_id] = one

    def prefill(self, units: Sequence[Admission]) -> list[SequenceState]:
        self.filling = True
        for unit in units:
            assert not unit.followers
            del self.queue[unit.leader.sequence_id]
            reserve(unit, self.account, held=0, new=0, plan=self.plan)
        combine([unit.leader for unit in units], Event.COMBINE_PREFILL, "")
        return [unit.leader for unit in units]

    def do(self, action: Action) -> int:
        """Carry out an action of the boundary; return how many sequences it suspends."""
        match action:
            case Grow():
                growth.carry_out(action, self.account)
            case Suspend(sequences=sequences):
                for one in sequences:
                    self.suspend(one)
                return len(sequences)
            case Extend(pages=pages):
                for one, number in pages:
                    self.device.resize(one.sequence_id, number)
            case Restore(pages=pages):
                for one, number in pages:
                    self.device.reserve(one.sequence_id, number)
                    self.returning.append((self.ready.pop(one.sequence_id), 2))
            case Join(wait=wait):
                self.join(wait=wait)
            case BeginInterval() | Idle():
                self.steps, self.changed, self.filling = 0, False, False
            case _:
                assert isinstance(action, Sync), f"{action} was not to be expected"
        return 0

    def suspend(self, one: SequenceState) -> None:
        self.running.remove(one)
        advance(one, Event.SUSPEND, "")
        self.device.release(one.sequence_id)
        self.wait(one)

    def join(self, *, wait: bool = False) -> None:
        came = [one for one, left in self.returning if wait or left <= 0]
        self.returning = [(one, left) for one, left in self.returning if one not in came]
        combine(came, Event.COMBINE_DECODE, "")
        self.running += came

    def depart(self, name: str) -> tuple[SequenceState, int]:
        """Let a sequence go that moves; return it with its part of the lease."""
        running = next((one for one in self.running if one.sequence_id == name), None)
        if running is not None:
            self.suspend(running)
        one, leased = self.ready.pop(name), self.kv.leased.blocks_with(name)
        migrate(one, Event.DEPART, "")
        self.account.release(name)
        self.kv.leased.change(-leased)
        self.changed = True
        return one, leased

    def adopt(self, one: SequenceState, leased: int) -> None:
        self.kv.leased.change(leased)
        pages, whole = arriving_pages(one, self.account, self.plan), self.account.whole_pages(one)
        assert not self.account.has_waiting, "those that wait for pages come first"
        self.account.reserve(one.sequence_id, pages, whole=whole)
        migrate(one, Event.ARRIVE, "")
        enter_in_turn(self.ready, one)
        self.waits = max(self.waits, one.waits_since)
        self.changed = True

    def end(self, one: SequenceState) -> None:
        self.account.release(one.sequence_id)
        if self.device.holds(one.sequence_id):
            self.device.release(one.sequence_id)
        self.account.policy.finished(one, one.generated_tokens)
        self.changed = True


class VirtualNode:
    """Runs jobs to their ends, with decisions for all ranks at each boundary. `device`: pages of each rank."""

    def __init__(
        self,
        jobs: Sequence[Job],
        plan: Plan,
        *,
        num_ranks: int,
        device: int,
        store: int,
        migration: Migration = Migration.EVEN,
        admission: Callable[[], AdmissionPolicy] = Reserve,
    ) -> None:
        self.plan, self.store, self.log = plan, store, NodeLog()
        self._decider = VirtualDecider(plan, migration)
        self.records = self._decider.records
        self.ranks = [
            NodeRank(plan, device=device, share=store // num_ranks, store=store, admission=admission())
            for _ in range(num_ranks)
        ]
        self.jobs = {f"s{number}": job for number, job in enumerate(jobs)}
        self._arriving = list(self.jobs)
        self._boundaries = 0

    def run(self) -> NodeLog:
        most = 10 * sum(job.output for job in self.jobs.values()) + max(job.at for job in self.jobs.values()) + 100
        while len(self.log.ended) < len(self.jobs):
            assert self.log.steps < most, f"no end after {most} steps"
            self.step()
        return self.log

    def step(self) -> None:
        """Run one forward pass of all ranks, after the boundaries before it."""
        self._arrive()
        for _ in range(6):
            if self._pass():
                break
        else:
            assert not any(rank.sequences for rank in self.ranks), "boundaries without a pass are repeated"
        self.log.steps += 1
        self._check()

    def _arrive(self) -> None:
        for name in [name for name in self._arriving if self.jobs[name].at <= self.log.steps]:
            job = self.jobs[name]
            self._arriving.remove(name)
            rank = self.ranks[job.rank]
            rank.queue[name] = SequenceState(
                sequence_id=name,
                arrival=int(name[1:]),
                prompt_tokens=job.prompt,
                max_new_tokens=job.new,
                ranks=frozenset((job.rank,)),
            )
            rank.changed = True

    def _pass(self) -> bool:
        """Take the step that all ranks take next; return whether it has a forward pass."""
        for rank in self.ranks:
            rank.join()
        step = next_step([self._header(rank) for rank in self.ranks], self.plan)
        if step.kind is StepKind.BOUNDARY:
            return self._boundary(others_run=step.any_rank_decodes)
        if step.kind is StepKind.DECODE:
            self._decode()
        return step.kind is StepKind.DECODE

    @staticmethod
    def _header(rank: NodeRank) -> RankHeader:
        state = rank.state()
        waiting = len(state.ready) + len(state.queued) + state.returning
        return RankHeader(running=state.running, waiting=waiting, forked=0, due=rank_is_due(state, rank.plan))

    def _boundary(self, *, others_run: bool) -> bool:
        self._boundaries += 1
        for rank in self.ranks:
            rank.waits = max(rank.waits, self._boundaries << 20)
            for action in growth.extend_running(rank.kv_state(), self.plan):
                self.log.suspended += rank.do(action)
        states = [rank.rank_state(lambda name: self.jobs[name].stays) for rank in self.ranks]
        decision = self._decider.decide(states)
        for rank, lease in zip(self.ranks, decision.leases, strict=True):
            rank.kv.leased.set(lease)
        if decision.prefill:
            for rank, (action,) in zip(self.ranks, decision.actions, strict=True):
                if isinstance(action, Prefill):
                    for one in rank.prefill(action.units):
                        self._token(rank, one)
            return True
        self._move(decision.moves)
        for rank in self.ranks:
            self._cross(rank, others_run=others_run)
        self.log.rows.append([len(rank.running) + len(rank.returning) for rank in self.ranks])
        return False

    def _move(self, moves: Sequence[Move]) -> None:
        for move in moves:
            one, leased = self.ranks[move.source].depart(move.sequence_id)
            one.ranks = frozenset((move.target,))
            self.ranks[move.target].adopt(one, leased)
        self.log.moved += len(moves)

    def _cross(self, rank: NodeRank, *, others_run: bool) -> None:
        while True:
            actions = rank.policy.at_boundary(rank.state(), rank.kv_state(), self.plan, others_run=others_run)
            for action in actions:
                self.log.suspended += rank.do(action)
            if isinstance(actions[-1], BeginInterval | Idle):
                return

    def _decode(self) -> None:
        for rank in self.ranks:
            rank.steps += 1
            rank.returning = [(one, left - 1) for one, left in rank.returning]
            for one in list(rank.running):
                held = rank.device.held(one.sequence_id)
                assert pages_for(one.kv_tokens, self.plan.page_size) <= held, "a running sequence has its pages"
                self._token(rank, one)

    def _token(self, rank: NodeRank, one: SequenceState) -> None:
        one.generated_tokens += 1
        ends = one.generated_tokens >= self.jobs[one.sequence_id].output
        if one in rank.running:
            if ends:
                rank.running.remove(one)
                advance(one, Event.FINISH, "")
        else:
            yield_(one, finished=ends, why="")
            if not ends:
                rank.wait(one)
                rank.changed = True
        if ends:
            rank.end(one)
            self.log.ended[one.sequence_id] = self.log.steps

    def _check(self) -> None:
        uses = [rank.kv.leased.use() for rank in self.ranks]
        assert sum(use.leased for use in uses) <= self.store, "no block is leased twice"
        names = [one.sequence_id for rank in self.ranks for one in rank.sequences]
        assert len(set(names)) == len(names), "a sequence is on one rank, in one state"
        assert {*names, *self.log.ended, *self._arriving} == self.jobs.keys(), "no sequence is lost"
        for rank, use in zip(self.ranks, uses, strict=True):
            assert use.kept <= use.leased
            assert rank.account.free_pages >= 0
            in_store = {one.sequence_id for one in rank.sequences} - rank.queue.keys()
            assert rank.account.reservations().keys() == in_store
            turns = [one.waits_since for one in rank.ready.values()]
            assert turns == sorted(turns), "waiting sequences are in the order of their turns"
            assert len(rank.running) + len(rank.returning) <= self.plan.decode.b_moe
