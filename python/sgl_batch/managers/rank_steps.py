"""Owns one rank's part in the steps of its group: it agrees with the others, and has the boundary executor act.

`rank_group` has the agreement, core/ the decisions.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sgl_batch.core.admission import Admission, note_expected
from sgl_batch.core.node_pool import device_room
from sgl_batch.core.page_boundary import State
from sgl_batch.core.rank_agreement import MOST_QUEUED, GroupStep, RankHeader, StepKind, rank_is_due
from sgl_batch.core.rank_state import RankState
from sgl_batch.core.sequence import SequenceState
from sgl_batch.core.store_lease import Lease
from sgl_batch.managers.boundary_executor import BoundaryExecutor
from sgl_batch.managers.rank_group import RankGroup
from sgl_batch.managers.rank_messages import BoundaryActions, StateMessage, copies_of, message_of, moves_of
from sgl_batch.managers.rank_migration import RankMigration
from sgl_batch.managers.rank_partition import RankPartition
from sgl_batch.sglang_adapter.types.batches import ScheduleBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A rank's part in a step. `batch` is None where it has no rows. `running`: the decode batch from now on.

    `takes_part`: whether the step has exchanges between ranks, in which a rank without rows takes part too.
    `expert_calls`: how many expert calls each layer makes, the same on all ranks. `idles`: no rank has anything to do.
    `shared_by`: the ranks that compute this prompt together; empty if the batch is this rank's alone, or of decode.
    """

    batch: ScheduleBatch | None
    running: ScheduleBatch
    takes_part: bool
    expert_calls: int = 1
    idles: bool = False
    shared_by: Sequence[int] = ()


class RankSteps:
    """Replaces the executor's `next_batch` where there are several ranks."""

    def __init__(
        self,
        executor: BoundaryExecutor,
        group: RankGroup,
        migration: RankMigration,
        at_boundary: Callable[[], None] = lambda: None,
        partition: RankPartition | None = None,
    ) -> None:
        """Take what acts and agrees.

        Args:
            executor: the sequences of this rank.
            group: the agreement of all ranks.
            migration: carries out moves.
            at_boundary: called before anything is decided at a boundary.
            partition: carries out partitions; without it, this rank takes no replicas.
        """
        self._executor, self._group, self._migration, self._partition = executor, group, migration, partition
        self._at_boundary = at_boundary
        self._prefill_begun: tuple[int, float] | None = None
        self._changes: deque[Callable[[], None]] = deque()
        self._changes_known = self._changes_due = self._changes_made = self._boundaries = 0
        self._held = False

    @property
    def holds_copies(self) -> bool:
        """Whether this rank holds pages for sequences of other ranks."""
        return bool(self._migration.held)

    def between_steps(self, change: Callable[[], None]) -> None:
        """Make `change` between two steps, the same two on every rank, after all earlier changes."""
        self._changes.append(change)
        self._changes_known += 1

    def make_changes(self) -> None:
        """Make the changes that all ranks know of. While the engine is paused, no step begins, so all can be made."""
        while self._changes and (self._executor.paused or self._changes_made < self._changes_due):
            self._changes_made += 1
            self._changes.popleft()()

    def next_part(self, running: ScheduleBatch) -> Part:
        """Agree with the other ranks on the next step, and return this rank's part in it.

        At a boundary this also migrates and refills. `running` is the decode batch, without finished requests.
        """
        executor = self._executor
        running = executor.join_arrived(running)
        self._migration.advance()
        self._end_prefill()
        header = self._header(executor.state(running))
        with executor.clock.part("agreement"):
            step = self._group.agree(header, executor.plan)
        executor.clock.shift(self._group.take_waited_s(), source="agreement", target="stall")
        self._changes_due = step.plan_changes
        if step.kind is StepKind.IDLE:
            executor.sync()
            self._migration.drop_copies()
            return Part(batch=None, running=running, takes_part=False, idles=True)
        if step.kind is StepKind.BOUNDARY:
            return self._boundary(running, step)
        batch = None
        if step.kind is StepKind.FORKS:
            batch = executor.prefill_choices(executor.plan.prefill.b_moe) if executor.num_forked else None
        elif self._held:
            executor.count_step()
        else:
            batch = executor.composed_step(running)
        return Part(batch=batch, running=running, takes_part=True, expert_calls=step.expert_calls)

    def _header(self, state: State) -> RankHeader:
        """Return what the others learn of this rank before a step. On a held rank all sequences count as waiting."""
        waiting = len(state.ready) + len(state.queued) + state.returning + (state.begun is not None)
        return RankHeader(
            running=0 if self._held else state.running,
            waiting=waiting + (state.running if self._held else 0),
            forked=self._executor.num_forked,
            due=rank_is_due(state, self._executor.plan),
            plan_changes=self._changes_known,
        )

    def _boundary(self, running: ScheduleBatch, step: GroupStep) -> Part:
        executor, began = self._executor, time.perf_counter()
        self._boundaries += 1
        executor.table.at_boundary(self._boundaries)
        self._at_boundary()
        with executor.clock.part("boundary"):
            running = executor.extend_running(running)
            actions = self._group.decide(self._state_message(running), executor.plan)
            if any(self._group.rank in ranks for ranks in actions.ends):
                running = self._partitioned.end(running)
            if actions.lease is not None and (leased := executor.kv.leased) is not None:
                blocks, admits = actions.lease
                leased.set(Lease(blocks=blocks, admits=admits))
        self._held = actions.held
        if actions.prefill:
            return self._prefill(actions, running)
        with executor.clock.part("boundary"):
            self._migration.run(moves_of(actions), running)
            self._migration.copy(copies_of(actions))
        if actions.partitions:
            with executor.clock.part("boundary"):
                running = self._partitioned.begin(actions.partitions, running)
                executor.clock.shift(self._group.take_waited_s(), source="boundary", target="stall")
        # The others learn of this rank's rows before the next step, so these boundaries end without a forward pass.
        if executor.decides_alone:
            running = executor.cross_boundary(running, others_run=step.any_rank_decodes)
            return Part(batch=None, running=running, takes_part=False)
        if actions.partitions:
            executor.begin_interval(running, began)
            return Part(batch=None, running=running, takes_part=False)
        return self._refill(actions, running, began)

    def _prefill(self, actions: BoundaryActions, running: ScheduleBatch) -> Part:
        """Return this rank's part of a prefill phase: its own prompts, or the replica of one that all ranks share."""
        executor, batch, shared_by = self._executor, None, list[int]()
        if actions.partitions:
            (partition,) = actions.partitions
            with executor.clock.part("boundary"):
                shared_by = partition.ranks if self._partitioned.prompts.begin(partition) else []
                executor.clock.shift(self._group.take_waited_s(), source="boundary", target="stall")
        if actions.units or executor.begun is not None:
            units = self._units(actions)
            batch = executor.prefill(executor.assign_tier(units, running))
            if not shared_by:
                self._prefill_begun = sum(unit.leader.prefill_rows for unit in units), time.perf_counter()
        elif shared_by:
            batch = self._partitioned.prompts.batch()
        calls = actions.expert_calls
        return Part(batch=batch, running=running, takes_part=True, expert_calls=calls, shared_by=shared_by)

    @property
    def _partitioned(self) -> RankPartition:
        assert self._partition is not None, "only ranks that take replicas are partitioned"
        return self._partition

    def _refill(self, actions: BoundaryActions, running: ScheduleBatch, began: float) -> Part:
        """Refill after the moves of a boundary at which no rank prefills, and begin the first step after it."""
        joining = self._joining(actions, running)
        if joining:
            running = self._executor.refill(joining, running)
        self._executor.begin_interval(running, began)
        if actions.busy and actions.held:
            self._executor.count_step()
        batch = self._executor.composed_step(running) if actions.busy and not actions.held else None
        return Part(
            batch=batch,
            running=running,
            takes_part=actions.busy,
            expert_calls=actions.expert_calls,
            idles=not actions.busy,
        )

    def _end_prefill(self) -> None:
        """Note how long the last step took, if it was a prefill."""
        if self._prefill_begun is not None:
            tokens, began = self._prefill_begun
            self._migration.note_prefill(tokens, time.perf_counter() - began)
            self._prefill_begun = None

    def _joining(self, actions: BoundaryActions, running: ScheduleBatch) -> tuple[SequenceState, ...]:
        """Return the sequences that join the decode batch.

        Sequences whose move has failed join as well, while there is room. Otherwise a sequence whose moves always fail
        would never run.
        """
        stayed = [move.sequence_id for move in actions.moves if move.source == self._group.rank]
        room = max(0, self._executor.plan.decode.b_moe - self._executor.state(running).running)
        return self._executor.ready_named([*actions.refill, *stayed])[:room]

    def _state_message(self, running: ScheduleBatch) -> StateMessage:
        """Return this rank's state for the control rank."""
        executor = self._executor
        ledger, state = executor.admission_ledger, executor.state(running)
        executor.estimate_shared(state)
        for sequence in state.queued[:MOST_QUEUED] if ledger.policy.grows else ():
            note_expected(Admission(leader=sequence), ledger.policy)
        partition, leased = self._partition, executor.kv.leased
        return message_of(
            RankState.of(
                state,
                ledger,
                executor.capacity(running),
                executor.movable(running),
                ended=executor.table.take_ended(),
                partition=frozenset() if partition is None else partition.ranks,
                replicas=0 if partition is None else partition.num_replicas,
                takes_replicas=partition is not None and not executor.kv_state(running).streams,
                store=None if leased is None else leased.use(),
                device_room=0 if leased is None else device_room(executor.kv_state(running), executor.plan),
                replica_room=executor.table.replica_room(running),
                sends_pages=self._migration.sends_pages,
                held=self._migration.held,
                queued=executor.table.queue_movable(state.queued[: executor.plan.decode.b_moe], executor.plan),
                rates=self._migration.rates,
            )
        )

    def _units(self, actions: BoundaryActions) -> tuple[Admission, ...]:
        named = [self._executor.queued_named(names) for names in actions.units]
        units = tuple(Admission(leader=leader, followers=tuple(followers)) for leader, *followers in named)
        for unit in units:
            note_expected(unit, self._executor.admission_ledger.policy)
        return units
