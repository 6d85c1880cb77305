"""Owns one rank without an engine: it does with virtual sequences what the boundary executor does with requests.

It has the methods of the executor that the steps of several ranks call, and checks the limits of each action.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import replace

import virtual_checks
import virtual_partition
from virtual_overflow import VirtualOverflow
from virtual_sequences import Batch, Fate, Request, Running, computed_with, prompt_of
from virtual_store import VirtualKV
from virtual_table import VirtualTable

from sgl_batch.core import growth
from sgl_batch.core.actions import (
    Action,
    Actions,
    BeginInterval,
    Chunk,
    Grow,
    Idle,
    Join,
    Prefill,
    Refill,
    Restore,
    Suspend,
)
from sgl_batch.core.admission import (
    Admission,
    arriving_pages,
    group_by_prompt,
    note_expected,
    refusal,
    reserve,
)
from sgl_batch.core.admission_policy import RESERVE, AdmissionPolicy
from sgl_batch.core.coroutine import Event, advance
from sgl_batch.core.decide import compose
from sgl_batch.core.decision_record import Observed
from sgl_batch.core.kv_policy import DeviceOnly, KVPolicy, Overflowing
from sgl_batch.core.kv_state import KVState
from sgl_batch.core.node_pool import device_room
from sgl_batch.core.page_boundary import State
from sgl_batch.core.page_ledger import PageLedger, pages_for
from sgl_batch.core.plan import Plan
from sgl_batch.core.prefixes import PrefixTree, estimate_shared
from sgl_batch.core.primitives import combine, migrate, yield_
from sgl_batch.core.rank_state import Movable, RankState
from sgl_batch.core.sequence import SequenceState, Status
from sgl_batch.metrics.counters import PartClock


class VirtualRank:
    """The sequences of one rank. `fates`: by sequence id, shared by all ranks.

    `overflow`: where sequences go that give way, if reservations grow by `admission`. `records`: of its own decisions.
    `pool_pages`: of a store that the ranks share, of which `pages` are this rank's lease at first; 0 without one.
    """

    def __init__(
        self,
        plan: Plan,
        fates: dict[str, Fate],
        *,
        pages: int,
        request_slots: int,
        admission: AdmissionPolicy = RESERVE,
        overflow: VirtualOverflow | None = None,
        pool_pages: int = 0,
    ) -> None:
        self.plan, self.request_slots, self.fates = plan, request_slots, fates
        self.ledger = PageLedger(pages, plan.page_size, policy=admission, pool_pages=pool_pages)
        self.kv = VirtualKV(self.ledger)
        self.replica_ledger = virtual_partition.replica_ledger(self.ledger)
        self.overflow = VirtualOverflow(0, restore_steps=0) if overflow is None else overflow
        self.decides_alone = admission.grows
        self._policy: KVPolicy = Overflowing() if admission.grows else DeviceOnly()
        self.records: list[dict] = []
        self.suspensions = self.boundaries = 0
        self.clock = PartClock()
        self.queued: dict[str, SequenceState] = {}
        self.ready: dict[str, SequenceState] = {}
        self.running = Running()
        self.forks: dict[str, tuple[SequenceState, ...]] = {}
        self.forked: list[SequenceState] = []
        self.begun: SequenceState | None = None
        self.tree = PrefixTree(plan.page_size)
        self.expected: set[str] = set()
        self.ended: list[str] = []
        self.table = VirtualTable(self)
        self.refilled: list[str] = []
        self._arrivals = self._steps = self._changes = 0
        self._changes_at_boundary = -1
        self._filling = False

    # Intake.

    def enqueue(self, name: str, request: Request, group: str | None, choice: int) -> bool:
        """Queue a sequence and return True, or return False if it can never fit."""
        sequence = SequenceState(
            sequence_id=name,
            arrival=self._arrivals,
            prompt_tokens=request.prompt,
            max_new_tokens=request.max_new,
            prompt_group=group,
            choice=choice,
        )
        if self._refusal(sequence) is not None:
            return False
        self._arrivals += 1
        self._changes += 1
        self.queued[name] = sequence
        return True

    def _refusal(self, sequence: SequenceState) -> str | None:
        if self.kv.leased is None:
            return refusal(sequence, self.ledger)
        return refusal(sequence, PageLedger(1 << 40, self.plan.page_size), self.ledger)

    def abort(self, name: str) -> None:
        """End a sequence that is in no batch at once; one in a batch, or a waiting fork, ends with its next step."""
        if name in self.queued or name in self.ready:
            sequence = self.queued.pop(name, None) or self.ready.pop(name)
            self._end(sequence, Event.ABORT)
        else:
            self.fates[name].aborted = True

    def names(self) -> list[str]:
        """Return the id of every sequence of this rank, once for each collection that holds it."""
        begun = [] if self.begun is None else [self.begun]
        collections = (
            self.queued.values(),
            self.forked,
            self.ready.values(),
            (one for one in self.running.reqs if not virtual_partition.is_replica(one)),
            begun,
            self.overflow.returning,
            *self.forks.values(),
        )
        return [sequence.sequence_id for collection in collections for sequence in collection]

    # The executor's part in a group's steps.

    @property
    def num_forked(self) -> int:
        return len(self.forked)

    @property
    def admission_ledger(self) -> PageLedger:
        return self.ledger

    def capacity(self, running: Running) -> None:
        """Return None: there is one tier."""

    def assign_tier(self, units: tuple[Admission, ...], running: Running) -> Prefill:
        return Prefill(units=units, rest=self.state(running).rest)

    def join_arrived(self, running: Running, *, wait: bool = False) -> Running:
        came = self.overflow.arrived(wait=wait)
        for sequence in came:
            self.ledger.come_back(sequence.sequence_id)
        combine(came, Event.COMBINE_DECODE, "")
        running.reqs += came
        return running

    def sync(self) -> None:
        """Do nothing: there are no copies."""

    def state(self, running: Running) -> State:
        promised = len(self.forked) + sum(len(forks) for forks in self.forks.values()) + (self.begun is not None)
        waiting = sum(name not in self.ledger.away for name in self.ready)
        return State(
            queued=list(self.queued.values()),
            ready=list(self.ready.values()),
            running=len(running.reqs),
            steps=self._steps,
            request_slots=self.request_slots,
            free_request_slots=self.request_slots - len(running.reqs) - waiting - promised,
            filling=self._filling,
            changed=self._changes != self._changes_at_boundary,
            returning=len(self.overflow.returning),
            queued_tokens=sum(sequence.prompt_tokens for sequence in self.queued.values()),
            begun=self.begun,
        )

    def movable(self, running: Running) -> tuple[list[Movable], list[Movable]]:
        owned = [one for one in running.reqs if not virtual_partition.is_replica(one)]
        return self._policy.movable(
            self.table.movable(self.ready.values()), self.table.movable(owned), self._kv(running), self.plan
        )

    def is_rooted(self, sequence: SequenceState) -> bool:
        fate = self.fates[sequence.sequence_id]
        return fate.rooted or fate.aborted

    def estimate_shared(self, state: State) -> None:
        self._estimate_shared(unit.leader for unit in group_by_prompt(state.queued, most_members=self.request_slots))

    def _estimate_shared(self, leaders: Iterable[SequenceState]) -> None:
        estimate_shared(((one, prompt_of(one)) for one in leaders), self.tree, rows=self.plan.prefill.b_moe)

    def rank_state(self) -> RankState:
        """Return the state of this rank at a boundary."""
        state = self.state(self.running)
        self.estimate_shared(state)
        for sequence in state.queued:
            note_expected(Admission(leader=sequence), self.ledger.policy)
        leased = self.kv.leased
        return RankState.of(
            state,
            self.ledger,
            None,
            self.movable(self.running),
            ended=self.table.take_ended(),
            partition=virtual_partition.set_of(self.running),
            replicas=virtual_partition.num_replicas(self.running),
            store=None if leased is None else leased.use(),
            device_room=0 if leased is None else device_room(self.kv_state(self.running), self.plan),
            replica_room=self.table.replica_room(self.running),
            queued=self.table.queue_movable(state.queued[: self.plan.decode.b_moe], self.plan),
        )

    def queued_named(self, names: Sequence[str]) -> list[SequenceState]:
        return [self.queued[name] for name in names]

    def ready_named(self, names: Sequence[str]) -> tuple[SequenceState, ...]:
        return tuple(self.ready[name] for name in names if name in self.ready)

    def prefill(self, action: Prefill) -> Batch:
        rest = [] if action.rest is None else [action.rest]
        num_prompts = len(action.units) + len(rest)
        assert num_prompts, "a prefill group has a prompt"
        tokens = sum(unit.leader.prefill_rows for unit in action.units) + sum(chunk.tokens for chunk in rest)
        assert tokens <= self.plan.prefill.b_moe or num_prompts == 1
        self._filling = True
        for chunk in rest:
            self._compute(chunk)
        for unit in action.units:
            self._take(unit)
        leaders = tuple(unit.leader for unit in action.units)
        combine(leaders, Event.COMBINE_PREFILL, "")
        return Batch(decode=False, sequences=(*(chunk.sequence for chunk in rest), *leaders), rows=tokens)

    def _kv(self, running: Running) -> KVState:
        return KVState(
            device=self.ledger,
            admission=self.ledger,
            runners=lambda: running.reqs,
            estimate_shared=self._estimate_shared,
        )

    def kv_state(self, running: Running) -> KVState:
        """Return where KV lies: the device has pages for all."""
        return replace(self._kv(running), device=self.replica_ledger, runners=lambda: [])

    def extend_running(self, running: Running) -> Running:
        if not self.ledger.policy.grows:
            return running
        observed = Observed(self.state(running), self._kv(running))
        return self._carry_out(observed, growth.extend_running(observed.kv, self.plan), running, "growth")

    def cross_boundary(self, running: Running, *, others_run: bool) -> Running:
        boundaries = self.boundaries
        while self.boundaries == boundaries:
            observed = Observed(self.state(running), self._kv(running))
            actions = self._policy.at_boundary(observed.state, observed.kv, self.plan, others_run=others_run)
            running = self._carry_out(observed, actions, running, "boundary", others_run=others_run)
        return running

    def _carry_out(
        self, observed: Observed, actions: Actions, running: Running, decision: str, *, others_run: bool = False
    ) -> Running:
        record = observed.record(self.plan, self._policy.name, actions, decision=decision, others_run=others_run)
        self.records.append(json.loads(json.dumps(record)))
        for action in actions:
            running = self._do(action, running)
        return running

    def _do(self, action: Action, running: Running) -> Running:
        match action:
            case Grow():
                growth.carry_out(action, self.ledger)
            case Suspend(sequences=sequences):
                self._suspend(sequences, running)
            case Refill(sequences=sequences):
                return self.refill(sequences, running)
            case Restore(pages=pages):
                for one, number in pages:
                    self.ledger.reserve(one.sequence_id, number, whole=self.ledger.whole_pages(one))
                    self.overflow.restore(self.ready.pop(one.sequence_id))
            case Join(wait=wait):
                return self.join_arrived(running, wait=wait)
            case BeginInterval() | Idle():
                self.begin_interval(running, 0.0)
            case _:
                raise AssertionError(f"{action} was not to be expected")
        return running

    def _suspend(self, sequences: tuple[SequenceState, ...], running: Running) -> None:
        room = self.overflow.room
        for one in sequences:
            running.reqs.remove(one)
            advance(one, Event.SUSPEND, "")
            self.ready[one.sequence_id] = one
            room -= pages_for(one.kv_tokens, self.plan.page_size)
            if room >= 0:
                self.overflow.put(one, self.plan.page_size)
                self.ledger.leave(one.sequence_id)
                self.ledger.add_prompt_pages(-len(self.tree.release(one.sequence_id)))
        self.suspensions += len(sequences)

    def composed_step(self, running: Running) -> Batch | None:
        partitioned = bool(virtual_partition.set_of(running))
        chunks = () if partitioned else compose(self.state(running), self._kv(running), self.plan, self._policy).prefill
        tokens = sum(chunk.tokens for chunk in chunks)
        assert tokens <= self.plan.mix_prefill
        whole = tuple(chunk.sequence for chunk in chunks if self._compute(chunk))
        assert all(self._steps < self.plan.boundary_tokens for _ in running.reqs), "a boundary is overdue"
        assert len(running.reqs) <= self.plan.decode.b_moe
        self.count_step()
        if not running.reqs:
            return Batch(decode=False, sequences=whole, rows=tokens) if chunks else None
        return Batch(decode=True, sequences=tuple(running.reqs), rows=len(running.reqs) + tokens, prompts=whole)

    def _compute(self, chunk: Chunk) -> bool:
        """Compute a chunk, and return whether its prompt is complete."""
        self.begun = computed_with(chunk, self.begun, self.plan, self._take)
        return self.begun is None

    def _take(self, unit: Admission) -> None:
        leader = unit.leader
        match = self.tree.match_and_insert(leader.sequence_id, prompt_of(leader))
        assert match.shared * self.plan.page_size == leader.shared_tokens, "the estimate is the number of shared pages"
        reserve(unit, self.ledger, held=len(match.pages), new=len(match.own), plan=self.plan)
        for follower in unit.followers:
            self.tree.match_as(follower.sequence_id, leader.sequence_id, self.ledger.shared_pages(leader))
        for member in unit.members:
            assert self.queued.pop(member.sequence_id) is member
        if unit.followers:
            self.forks[leader.prompt_group or ""] = unit.followers

    def prefill_choices(self, most: int) -> Batch:
        taken, self.forked = tuple(self.forked[:most]), self.forked[most:]
        combine(taken, Event.COMBINE_PREFILL, "")
        return Batch(decode=False, sequences=taken, rows=len(taken))

    def refill(self, joining: Sequence[SequenceState], running: Running) -> Running:
        combine(joining, Event.COMBINE_DECODE, "")
        for sequence in joining:
            del self.ready[sequence.sequence_id]
            self.refilled.append(sequence.sequence_id)
        running.reqs += joining
        return running

    def begin_interval(self, running: Running, boundary_began: float) -> None:
        self._filling = False
        self._steps = 0
        self._changes_at_boundary = self._changes
        self.boundaries += 1

    def count_step(self) -> None:
        self._filling = False
        self._steps += 1
        self.overflow.step()

    # After a forward pass.

    def after(self, batch: Batch) -> None:
        """Give each sequence of the batch one more token."""
        decoded = batch.sequences if batch.decode else ()
        for sequence in (*batch.sequences, *batch.prompts):
            group = sequence.prompt_group
            if group in self.forks and sequence.is_leader:
                self.forked += self.forks.pop(group)
            fate = self.fates[sequence.sequence_id]
            if virtual_partition.is_replica(sequence):
                self._after_replica(sequence, fate)
                continue
            fate.left -= 1
            fate.generated += 1
            sequence.generated_tokens = fate.generated
            if fate.aborted or fate.left == 0:
                if sequence in decoded:
                    self.running.reqs.remove(sequence)
                self._end(sequence, Event.ABORT if fate.aborted else Event.FINISH)
            elif sequence not in decoded:
                yield_(sequence, finished=False, why="")
                self._changes += 1
                self.ready[sequence.sequence_id] = sequence

    def _after_replica(self, replica: SequenceState, fate: Fate) -> None:
        replica.generated_tokens += 1
        if fate.aborted or replica.generated_tokens in (fate.left + fate.generated, replica.max_new_tokens):
            advance(replica, Event.ABORT if fate.aborted else Event.FINISH, "")
            self.running.reqs[:] = [one for one in self.running.reqs if one is not replica]
            self._changes += 1
            self.replica_ledger.release(replica.sequence_id)

    def next_arrival(self) -> int:
        """Return the arrival number of a sequence that comes here."""
        self._arrivals += 1
        return self._arrivals - 1

    @property
    def has_arrivals(self) -> bool:
        """Whether a request has arrived since the last boundary."""
        return self._changes != self._changes_at_boundary

    def _end(self, sequence: SequenceState, event: Event) -> None:
        advance(sequence, event, "")
        self.ended.append(sequence.sequence_id)
        if event is Event.FINISH:
            self.table.ended.append(sequence.generated_tokens)
        self.ledger.policy.finished(sequence, sequence.generated_tokens)
        self.ledger.away.discard(sequence.sequence_id)
        self.overflow.forget(sequence)
        self._let_go(sequence)

    def _let_go(self, sequence: SequenceState) -> None:
        self._changes += 1
        if self.ledger.holds(sequence.sequence_id):
            self.ledger.release(sequence.sequence_id)
        self.ledger.add_prompt_pages(-len(self.tree.release(sequence.sequence_id)))

    # Migration.

    def sequence_named(self, name: str) -> SequenceState:
        """Return a READY or RUNNING sequence."""
        running = (sequence for sequence in self.running.reqs if sequence.sequence_id == name)
        return self.ready[name] if name in self.ready else next(running)

    def leased_by(self, name: str) -> int:
        """Return the part of the lease that a sequence takes along."""
        return 0 if self.kv.leased is None else self.kv.leased.blocks_with(name)

    def has_room(self, sequence: SequenceState, leased: int) -> bool:
        """Return whether a sequence that brings so much of a lease has room."""
        pages, whole = arriving_pages(sequence, self.ledger, self.plan), self.ledger.whole_pages(sequence)
        return self.ledger.fits(pages - leased, gap=whole - pages)

    def expect(self, sequence: SequenceState, leased: int = 0) -> None:
        """Reserve room for a sequence that will arrive; no decision asks for more than there is."""
        assert not self.ledger.has_waiting, "those that wait for pages come first"
        if self.kv.leased is not None:
            self.kv.leased.change(leased)
        pages = arriving_pages(sequence, self.ledger, self.plan)
        self.ledger.reserve(sequence.sequence_id, pages, whole=self.ledger.whole_pages(sequence))
        self.expected.add(sequence.sequence_id)
        assert len(self.expected) <= self.state(self.running).free_request_slots, (
            "no request slot for a sequence that arrives"
        )

    def depart(self, name: str) -> None:
        sequence, leased = self.sequence_named(name), self.leased_by(name)
        migrate(sequence, Event.DEPART, "")
        if self.ready.pop(name, None) is None:
            self.running.reqs.remove(sequence)
        self._let_go(sequence)
        if self.kv.leased is not None:
            self.kv.leased.change(-leased)

    def leave_queue(self, name: str) -> SequenceState:
        """Let a queued sequence leave."""
        sequence = self.queued.pop(name)
        migrate(sequence, Event.DEPART, "")
        return sequence

    def queue_arrived(self, departed: SequenceState) -> None:
        """Queue a sequence that was queued on another rank."""
        request = Request(at=0, rank=0, prompt=departed.prompt_tokens, output=1, max_new=departed.max_new_tokens)
        assert self.enqueue(departed.sequence_id, request, None, departed.choice), "no decision asks for the impossible"

    def adopt(self, departed: SequenceState) -> None:
        """Take in a sequence as the latest arrival of this rank."""
        name = departed.sequence_id
        self.expected.remove(name)
        sequence = SequenceState(
            sequence_id=name,
            arrival=self.next_arrival(),
            prompt_tokens=departed.prompt_tokens,
            max_new_tokens=departed.max_new_tokens,
            choice=departed.choice,
            status=Status.MIGRATING,
            generated_tokens=departed.generated_tokens,
        )
        migrate(sequence, Event.ARRIVE, "")
        self._changes += 1
        self.ready[name] = sequence

    def check(self) -> None:
        """Check the invariants between two steps."""
        virtual_checks.check(self)
