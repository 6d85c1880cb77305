"""Owns one rank without an engine: it does with virtual sequences what the boundary executor does with requests.

It has the methods of the executor that the steps of several ranks call, and checks the limits of each action.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from virtual_sequences import Batch, Fate, Request, Running, computed_with, prompt_of

from sgl_batch.core.actions import Chunk, Prefill
from sgl_batch.core.admission import Admission, group_by_prompt, refusal, reserve
from sgl_batch.core.coroutine import Event, advance
from sgl_batch.core.decide import compose
from sgl_batch.core.kv_policy import DeviceOnly
from sgl_batch.core.kv_state import KVState
from sgl_batch.core.page_boundary import State
from sgl_batch.core.page_ledger import PageLedger
from sgl_batch.core.plan import Plan
from sgl_batch.core.prefixes import PrefixTree, estimate_shared
from sgl_batch.core.primitives import combine, migrate, yield_
from sgl_batch.core.rank_agreement import Movable, RankState
from sgl_batch.core.sequence import SequenceState, Status
from sgl_batch.metrics.counters import PartClock


class VirtualRank:
    """The sequences of one rank. `fates`: by sequence id, shared by all ranks."""

    def __init__(self, plan: Plan, fates: dict[str, Fate], *, pages: int, request_slots: int) -> None:
        self.plan, self.request_slots, self.fates = plan, request_slots, fates
        self.ledger = PageLedger(pages, plan.page_size)
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
        if refusal(sequence, self.ledger) is not None:
            return False
        self._arrivals += 1
        self._changes += 1
        self.queued[name] = sequence
        return True

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
            self.running.reqs,
            begun,
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

    decides_alone = False

    def capacity(self, running: Running) -> None:
        """Return None: there is one tier."""

    def assign_tier(self, units: tuple[Admission, ...], running: Running) -> Prefill:
        return Prefill(units=units, rest=self.state(running).rest)

    def join_arrived(self, running: Running) -> Running:
        """Return the running batch: no KV is on its way."""
        return running

    def sync(self) -> None:
        """Do nothing: there are no copies."""

    def state(self, running: Running) -> State:
        promised = len(self.forked) + sum(len(forks) for forks in self.forks.values()) + (self.begun is not None)
        return State(
            queued=list(self.queued.values()),
            ready=list(self.ready.values()),
            running=len(running.reqs),
            steps=self._steps,
            request_slots=self.request_slots,
            free_request_slots=self.request_slots - len(running.reqs) - len(self.ready) - promised,
            filling=self._filling,
            changed=self._changes != self._changes_at_boundary,
            queued_tokens=sum(sequence.prompt_tokens for sequence in self.queued.values()),
            begun=self.begun,
        )

    def movable(self, running: Running) -> tuple[list[Movable], list[Movable]]:
        def items(sequences: Sequence[SequenceState]) -> list[Movable]:
            return [
                Movable(
                    sequence=sequence,
                    tokens=sequence.prompt_tokens + self.fates[sequence.sequence_id].generated - 1,
                    pages=self.ledger.whole_pages(sequence),
                )
                for sequence in sequences
                if sequence.prompt_group is None and not self._is_rooted(sequence)
            ]

        return items(list(self.ready.values())), items(running.reqs)

    def _is_rooted(self, sequence: SequenceState) -> bool:
        fate = self.fates[sequence.sequence_id]
        return fate.rooted or fate.aborted

    def estimate_shared(self, state: State) -> None:
        self._estimate_shared(unit.leader for unit in group_by_prompt(state.queued, most_members=self.request_slots))

    def _estimate_shared(self, leaders: Iterable[SequenceState]) -> None:
        estimate_shared(((one, prompt_of(one)) for one in leaders), self.tree, rows=self.plan.prefill.b_moe)

    def rank_state(self) -> RankState:
        """Return the state of this rank at a boundary."""
        self.estimate_shared(self.state(self.running))
        ready, running = self.movable(self.running)
        return RankState(
            state=self.state(self.running),
            total_pages=self.ledger.total_pages,
            free_pages=self.ledger.free_pages,
            ready=ready,
            running=running,
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

    def composed_step(self, running: Running) -> Batch | None:
        kv = KVState(
            device=self.ledger,
            admission=self.ledger,
            runners=lambda: running.reqs,
            estimate_shared=self._estimate_shared,
        )
        chunks = compose(self.state(running), kv, self.plan, DeviceOnly()).prefill
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
        reserve(unit, self.ledger, held=len(match.pages), new=len(match.own))
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

    def count_step(self) -> None:
        self._filling = False
        self._steps += 1

    # After a forward pass.

    def after(self, batch: Batch) -> None:
        """Give each sequence of the batch one more token."""
        decoded = batch.sequences if batch.decode else ()
        for sequence in (*batch.sequences, *batch.prompts):
            group = sequence.prompt_group
            if group in self.forks and sequence.is_leader:
                self.forked += self.forks.pop(group)
            fate = self.fates[sequence.sequence_id]
            fate.left -= 1
            fate.generated += 1
            if fate.aborted or fate.left == 0:
                if sequence in decoded:
                    self.running.reqs.remove(sequence)
                self._end(sequence, Event.ABORT if fate.aborted else Event.FINISH)
            elif sequence not in decoded:
                yield_(sequence, finished=False, why="")
                self._changes += 1
                self.ready[sequence.sequence_id] = sequence

    def _end(self, sequence: SequenceState, event: Event) -> None:
        advance(sequence, event, "")
        self.ended.append(sequence.sequence_id)
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

    def expect(self, sequence: SequenceState) -> None:
        """Reserve room for a sequence that will arrive; no decision asks for more than there is."""
        self.ledger.reserve(sequence.sequence_id, self.ledger.whole_pages(sequence))
        self.expected.add(sequence.sequence_id)
        assert len(self.expected) <= self.state(self.running).free_request_slots, (
            "no request slot for a sequence that arrives"
        )

    def depart(self, name: str) -> None:
        sequence = self.sequence_named(name)
        migrate(sequence, Event.DEPART, "")
        if self.ready.pop(name, None) is None:
            self.running.reqs.remove(sequence)
        self._let_go(sequence)

    def adopt(self, departed: SequenceState) -> None:
        """Take in a sequence as the latest arrival of this rank."""
        name = departed.sequence_id
        self.expected.remove(name)
        sequence = SequenceState(
            sequence_id=name,
            arrival=self._arrivals,
            prompt_tokens=departed.prompt_tokens,
            max_new_tokens=departed.max_new_tokens,
            choice=departed.choice,
            status=Status.MIGRATING,
        )
        self._arrivals += 1
        migrate(sequence, Event.ARRIVE, "")
        self._changes += 1
        self.ready[name] = sequence

    def check(self) -> None:
        """Check the invariants between two steps: statuses fit, pages add up, request slots suffice."""
        for status, sequences in (
            (Status.QUEUED, [*self.queued.values(), *self.forked]),
            (Status.READY, list(self.ready.values())),
            (Status.RUNNING, self.running.reqs),
        ):
            assert all(sequence.status is status for sequence in sequences)
        begun = [] if self.begun is None else [self.begun]
        assert all(sequence.status is Status.PREFILLING for sequence in begun)
        assert not self.forks
        assert not self.expected
        held = [*self.forked, *self.ready.values(), *self.running.reqs, *begun]
        assert len(held) <= self.request_slots
        assert len(self.running.reqs) <= self.plan.decode.b_moe
        holds = {s.sequence_id: self.tree.match_of(s.sequence_id).pages for s in held}
        prompts = {id(page) for pages in holds.values() for page in pages}
        pages = len(prompts) + sum(self.ledger.whole_pages(s) - len(holds[s.sequence_id]) for s in held)
        assert self.ledger.reserved_pages == pages
        assert self.ledger.free_pages + pages == self.ledger.total_pages
        assert self.ledger.free_pages >= 0
