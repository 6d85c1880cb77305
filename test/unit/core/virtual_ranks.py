"""Owns a group of virtual ranks in lockstep: each step is decided from all headers, each boundary from all states.

Every rank carries out its own actions. The invariants of the group are checked after every step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import virtual_partition
from virtual_decider import VirtualDecider
from virtual_overflow import VirtualOverflow
from virtual_rank import VirtualRank
from virtual_sequences import Batch, Fate, Request

from sgl_batch.core.actions import EndPartition, Partition, Prefill, Refill
from sgl_batch.core.admission_policy import AdmissionPolicy, Reserve
from sgl_batch.core.group_callbacks import BUILT_IN, Callbacks
from sgl_batch.core.plan import Plan
from sgl_batch.core.rank_agreement import GroupDecision, RankHeader, StepKind, next_step, rank_is_due
from sgl_batch.core.rank_moves import Migration, Move

# Boundaries in a row without a forward pass: where all runners have given way, the next one waits for KV.
_MOST_BOUNDARIES = 3
# Whether the target rank of a move accepts the sequence; by sequence id and step.
Takes = Callable[[str, int], bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A rank's part in a step: its batch, and the exchange that it enters, with or without rows (None: it idles)."""

    batch: Batch | None
    enters: tuple[str, int] | None

    @property
    def expert_calls(self) -> int:
        return self.enters[1] if self.enters is not None else 0


@dataclass(slots=True, kw_only=True)
class Log:
    """The events of a schedule. `active`: the sequences that each rank ran after a boundary without queued ones."""

    steps: int = 0
    boundaries: int = 0
    moved: int = 0
    moved_in_queues: int = 0
    stayed: int = 0
    partitions: int = 0
    undone: int = 0
    ended_partitions: int = 0
    prompts_shared: int = 0
    refused: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    ended_at: dict[str, int] = field(default_factory=dict)
    active: list[list[int]] = field(default_factory=list)


class VirtualRanks:
    """Runs requests to their ends. A fault shows as an AssertionError, or in the `Log`."""

    def __init__(
        self,
        requests: list[Request],
        plan: Plan,
        *,
        num_ranks: int,
        pages: int,
        request_slots: int,
        migration: Migration,
        takes: Takes = lambda name, step: True,
        admission: Callable[[], AdmissionPolicy] = Reserve,
        overflow_pages: int = 0,
        restore_steps: int = 0,
        callbacks: Callbacks = BUILT_IN,
        is_shared: bool = False,
    ) -> None:
        """`is_shared`: whether all pages are those of one store, of which each rank has a lease."""
        self.plan = plan
        self._decider = VirtualDecider(plan, migration, callbacks)
        self.records, self.log = self._decider.records, Log(faults=self._decider.faults)
        self._held: frozenset[int] = frozenset()
        self._pool_pages = pages if is_shared else 0
        self._takes = takes
        self._fates: dict[str, Fate] = {}
        self.ranks = [
            VirtualRank(
                plan,
                self._fates,
                pages=pages // num_ranks if is_shared else pages,
                pool_pages=pages if is_shared else 0,
                request_slots=request_slots,
                admission=admission(),
                overflow=VirtualOverflow(overflow_pages, restore_steps=restore_steps),
            )
            for _ in range(num_ranks)
        ]
        self._arriving = sorted(enumerate(requests), key=lambda numbered: numbered[1].at)
        self._aborting: list[tuple[int, str]] = []

    @property
    def is_done(self) -> bool:
        return not self._arriving and not self.alive

    @property
    def alive(self) -> set[str]:
        """Every sequence that has arrived and has not ended."""
        return self._fates.keys() - self.log.ended_at.keys()

    def run(self) -> Log:
        """Step until every request has ended. There are at most as many steps with work as tokens."""
        last = max((request.at for _, request in self._arriving), default=0)
        chunks = sum(-(-request.prompt // self.plan.page_size) * request.choices for _, request in self._arriving)
        most_steps = last + 1 + sum(request.output * request.choices for _, request in self._arriving)
        most_steps += chunks if self.plan.mix_prefill else 0
        while not self.is_done:
            assert self.log.steps < most_steps, f"no end after {most_steps} steps"
            self.step()
        assert all(rank.ledger.reserved_pages == 0 for rank in self.ranks), "the last sequence gives back the last page"
        return self.log

    def step(self) -> None:
        """Run one step of all ranks, and check its invariants."""
        self.finish(self.launch())

    def launch(self) -> list[Part]:
        """Begin a step, and return what every rank does in it."""
        self._arrive()
        self._abort()
        at_work = any(rank.names() for rank in self.ranks)
        parts = self.parts()
        # Ranks that decide alone end a boundary without a forward pass.
        for _ in range(_MOST_BOUNDARIES):
            if parts[0].enters is None and at_work:
                parts = self.parts()
        entered = {part.enters for part in parts}
        assert len(entered) == 1, f"the ranks enter different exchanges: {entered}"
        batches = [part.batch for part in parts if part.batch is not None]
        assert at_work == (parts[0].enters is not None), "ranks idle if, and only if, none has work"
        assert at_work == bool(batches), "in each step some sequence advances: an idle boundary could repeat for ever"
        return parts

    def finish(self, parts: Sequence[Part]) -> None:
        """Process the results of the step."""
        for rank, part in zip(self.ranks, parts, strict=True):
            if part.batch is not None:
                assert part.batch.rows, "a batch has rows"
                assert part.batch.expert_calls(self.plan) <= part.expert_calls, "no rank needs more calls than agreed"
                rank.after(part.batch)
        self._check()
        self.log.steps += 1

    def _arrive(self) -> None:
        while self._arriving and self._arriving[0][1].at <= self.log.steps:
            number, request = self._arriving.pop(0)
            group = f"g{number}" if request.choices > 1 else None
            for choice in range(request.choices):
                name = f"s{number}.{choice}"
                if not self.ranks[request.rank].enqueue(name, request, group, choice):
                    self.log.refused.append(name)
                    continue
                self._fates[name] = Fate(left=request.output, rooted=request.rooted)
                if request.abort_at is not None:
                    self._aborting.append((max(request.abort_at, request.at), name))

    def _abort(self) -> None:
        for at, name in [due for due in self._aborting if due[0] <= self.log.steps]:
            self._aborting.remove((at, name))
            for rank in self.ranks:
                if name in rank.names():
                    rank.abort(name)

    def parts(self) -> list[Part]:
        """Return what every rank does next."""
        for rank in self.ranks:
            rank.running = rank.join_arrived(rank.running)
        headers = [self._header(rank, held=number in self._held) for number, rank in enumerate(self.ranks)]
        step = next_step(headers, self.plan)
        if step.kind is StepKind.IDLE:
            return [Part(batch=None, enters=None) for _ in self.ranks]
        if step.kind is StepKind.BOUNDARY:
            for rank in self.ranks:
                rank.running = rank.extend_running(rank.running)
            states = [rank.rank_state() for rank in self.ranks]
            decision = self._decider.decide(states, record=self.ranks[0].decides_alone)
            for rank, lease in zip(self.ranks, decision.leases, strict=bool(decision.leases)):
                rank.kv.leased.set(lease)
            self._held = decision.held
            return self._boundary(decision, others_run=step.any_rank_decodes)
        if step.kind is StepKind.FORKS:
            batches = [
                rank.prefill_choices(self.plan.prefill.b_moe) if rank.num_forked else None for rank in self.ranks
            ]
        else:
            batches = [
                rank.count_step() if number in self._held else rank.composed_step(rank.running)
                for number, rank in enumerate(self.ranks)
            ]
        return [Part(batch=batch, enters=(step.kind.value, step.expert_calls)) for batch in batches]

    @staticmethod
    def _header(rank: VirtualRank, *, held: bool) -> RankHeader:
        state = rank.state(rank.running)
        waiting = len(state.ready) + len(state.queued) + state.returning + (state.begun is not None)
        return RankHeader(
            running=0 if held else state.running,
            waiting=waiting + (state.running if held else 0),
            forked=rank.num_forked,
            due=rank_is_due(state, rank.plan),
        )

    def _boundary(self, decision: GroupDecision, *, others_run: bool) -> list[Part]:
        self.end_partitions(decision.ends)
        decodes_alone = not decision.prefill and not any(rank.queued or rank.begun for rank in self.ranks)
        if not decision.prefill:
            self.carry_out(decision.moves)
            self.partition(decision.partitions)
            if self.ranks[0].decides_alone:
                for rank in self.ranks:
                    rank.running = rank.cross_boundary(rank.running, others_run=others_run)
                self.log.boundaries += 1
                return [Part(batch=None, enters=None) for _ in self.ranks]
            if decision.partitions:
                for rank in self.ranks:
                    rank.begin_interval(rank.running, 0.0)
                self.log.boundaries += 1
                return [Part(batch=None, enters=None) for _ in self.ranks]
        shared = self.share_prompt(decision.partitions) if decision.prefill else {}
        parts = []
        for number, (rank, (*_, action)) in enumerate(zip(self.ranks, decision.actions, strict=True)):
            batch = None
            if decision.prefill:
                batch = rank.prefill(action) if isinstance(action, Prefill) else shared.get(number)
            else:
                ordered = action.sequences if isinstance(action, Refill) else ()
                self._refill(rank, number, [sequence.sequence_id for sequence in ordered], decision.moves)
                rank.begin_interval(rank.running, 0.0)
                held = number in self._held
                batch = rank.composed_step(rank.running) if decision.busy and not held else None
                if decision.busy and held:
                    rank.count_step()
            kind = "prefill" if decision.prefill else "decode"
            enters = (kind, decision.expert_calls) if decision.busy else None
            parts.append(Part(batch=batch, enters=enters))
        self.log.boundaries += 1
        assert not shared or len({part.batch.rows for part in parts}) == 1, "ranks that share a prompt have its rows"
        if decodes_alone:
            self.log.active.append([len(rank.running.reqs) for rank in self.ranks])
        return parts

    @staticmethod
    def _refill(rank: VirtualRank, number: int, ordered: list[str], moves: Sequence[Move]) -> None:
        """Refill the decided sequences, and those whose move has failed, while there is room."""
        stayed = [move.sequence_id for move in moves if move.source == number]
        room = max(0, rank.plan.decode.b_moe - len(rank.running.reqs))
        rank.refill(rank.ready_named([*ordered, *stayed])[:room], rank.running)

    def carry_out(self, moves: Sequence[Move]) -> None:
        """Make all moves together: every target reserves room before any sequence leaves."""
        wanted = [move for move in moves if self._takes(move.sequence_id, self.log.steps)]
        taken = []
        for move in (move for move in wanted if not move.as_tokens):
            source, target = self.ranks[move.source], self.ranks[move.target]
            sequence, leased = source.sequence_named(move.sequence_id), source.leased_by(move.sequence_id)
            # Where a move before it has failed, what that sequence would have brought of its lease can lack.
            if len(wanted) == len(moves) or not leased or target.has_room(sequence, leased):
                target.expect(sequence, leased)
                taken.append(move)
        for move in taken:
            sequence = self.ranks[move.source].sequence_named(move.sequence_id)
            self.ranks[move.source].depart(move.sequence_id)
            self.ranks[move.target].adopt(sequence)
        for move in (move for move in wanted if move.as_tokens):
            self.ranks[move.target].queue_arrived(self.ranks[move.source].leave_queue(move.sequence_id))
            self.log.moved_in_queues += 1
            taken.append(move)
        self.log.moved += len(taken)
        self.log.stayed += len(moves) - len(taken)

    def end_partitions(self, ends: Sequence[EndPartition]) -> None:
        for end in ends:
            for number in end.ranks:
                rank = self.ranks[number]
                rank.running = virtual_partition.end(rank, number, rank.running)
        self.log.ended_partitions += len(ends)

    def partition(self, partitions: Sequence[Partition]) -> None:
        """Begin partitions, all or none: their replicas are refused as moves are."""
        if partitions:
            begun = virtual_partition.begin(self.ranks, partitions, lambda name: self._takes(name, self.log.steps))
            self.log.partitions += len(partitions) if begun else 0
            self.log.undone += 0 if begun else len(partitions)

    def share_prompt(self, partitions: Sequence[Partition]) -> dict[int, Batch]:
        """Return the batches of replicas of the prompt that a prefill phase computes, by rank; none if none is shared.

        A replica is refused as a move is.
        """
        if not partitions:
            return {}
        (whole,) = partitions
        shared = virtual_partition.prompt_replicas(self.ranks, whole, lambda name: self._takes(name, self.log.steps))
        self.log.prompts_shared += bool(shared)
        return shared

    def _check(self) -> None:
        virtual_partition.check(self.ranks)
        names = [name for rank in self.ranks for name in rank.names()]
        for rank in self.ranks:
            rank.check()
            for name in rank.ended:
                assert name not in self.log.ended_at, f"{name} ends twice"
                self.log.ended_at[name] = self.log.steps
            rank.ended.clear()
        if self._pool_pages:
            uses = [rank.kv.leased.use() for rank in self.ranks]
            assert sum(use.leased for use in uses) <= self._pool_pages, "no block is leased twice"
            assert all(use.kept <= use.leased for use in uses)
        assert len(set(names)) == len(names), "a sequence is on one rank, in one state"
        assert set(names) == self.alive, "no sequence is lost"
