"""Owns the messages by which ranks agree, and their conversion to and from the types of core/."""

from __future__ import annotations

from dataclasses import astuple

import msgspec

from sgl_batch.core.actions import Partition, Prefill, Refill
from sgl_batch.core.early_copies import EarlyCopy, HeldCopy
from sgl_batch.core.exclusive import TierCapacity
from sgl_batch.core.move_costs import MoveRates
from sgl_batch.core.page_boundary import State
from sgl_batch.core.rank_agreement import MOST_QUEUED, GroupDecision, GroupStep, StepKind
from sgl_batch.core.rank_moves import Move
from sgl_batch.core.rank_state import Movable, RankState
from sgl_batch.core.sequence import SequenceState, Status
from sgl_batch.core.store_lease import StoreUse


class HeaderMessage(msgspec.Struct, tag="header", array_like=True, frozen=True):
    """A `RankHeader`, sent to the control rank before each step."""

    running: int
    waiting: int
    forked: int
    due: bool
    plan_changes: int


class StepMessage(msgspec.Struct, tag="step", array_like=True, frozen=True):
    """The step that all ranks take."""

    kind: str
    expert_calls: int
    plan_changes: int
    any_rank_decodes: bool


class SequenceRow(msgspec.Struct, array_like=True, frozen=True):
    """A sequence as decisions see it.

    `tokens`, `pages`, `gap`, `leased` and `replicable` are a `Movable`'s; the numbers are -1 if it cannot move.
    """

    sequence_id: str
    arrival: int
    prompt_tokens: int
    max_new_tokens: int
    prompt_group: str | None
    choice: int
    tokens: int
    pages: int
    gap: int
    replicable: bool
    leased: int
    shared_tokens: int
    generated_tokens: int
    computed_tokens: int
    expected_tokens: int
    waits_since: int


class HeldRow(msgspec.Struct, array_like=True, frozen=True):
    """A `HeldCopy`."""

    sequence_id: str
    source: int
    arrived: bool


class StateMessage(msgspec.Struct, tag="state", array_like=True, frozen=True):
    """A rank's state at a boundary."""

    queued: list[SequenceRow]
    ready: list[SequenceRow]
    running_movable: list[SequenceRow]
    running: int
    steps: int
    request_slots: int
    free_request_slots: int
    filling: bool
    returning: int
    total_pages: int
    free_pages: int
    overflow_pages: int
    largest: int
    grows: bool
    largest_gap: int
    has_waiting: bool
    capacity: tuple[int | None, int, bool] | None
    begun: SequenceRow | None
    partition: list[int]
    replicas: int
    takes_replicas: bool
    ended: list[int]
    store: tuple[int, int, int, bool] | None
    lacking: int
    device_room: int
    replica_room: int | None
    sends_pages: bool
    held: list[HeldRow]
    rates: tuple[float, float]


class MoveRow(msgspec.Struct, array_like=True, frozen=True):
    """A sequence that changes its rank."""

    sequence_id: str
    source: int
    target: int
    prepared: bool
    as_tokens: bool


class CopyRow(msgspec.Struct, array_like=True, frozen=True):
    """An `EarlyCopy`."""

    sequence_id: str
    source: int
    target: int
    full_pages: int
    pages: int
    gap: int


class PartitionRow(msgspec.Struct, array_like=True, frozen=True):
    """Sequences that are partitioned over `ranks`, in the order of their rows, with the rank that owns each."""

    sequence_ids: list[str]
    owners: list[int]
    ranks: list[int]


class BoundaryActions(msgspec.Struct, tag="actions", array_like=True, frozen=True):
    """What one rank does at a boundary. `units`, `refill`, `held` and `lease` are its own; the rest is the same on all.

    `units`: sequence ids of each prefill unit, its leader first. `ends`: the sets of ranks whose partition ends, before
    anything else is done. `held`: it decodes nothing until the next boundary. `lease`: the fields of a `Lease`, if
    there is one.
    """

    prefill: bool
    busy: bool
    expert_calls: int
    moves: list[MoveRow]
    copies: list[CopyRow]
    units: list[list[str]]
    refill: list[str]
    ends: list[list[int]]
    partitions: list[PartitionRow]
    held: bool = False
    lease: tuple[int, bool] | None = None


class DoneMessage(msgspec.Struct, tag="done", array_like=True, frozen=True):
    """Whether a rank has done its part of something; or, from the control rank, whether all have."""

    done: bool


Message = HeaderMessage | StepMessage | StateMessage | BoundaryActions | DoneMessage


def to_message(step: GroupStep) -> StepMessage:
    """Return the message of a step."""
    return StepMessage(step.kind.value, step.expert_calls, step.plan_changes, step.any_rank_decodes)


def step_of(message: StepMessage) -> GroupStep:
    """Return the step in a message."""
    return GroupStep(
        kind=StepKind(message.kind),
        expert_calls=message.expert_calls,
        plan_changes=message.plan_changes,
        any_rank_decodes=message.any_rank_decodes,
    )


def message_of(rank: RankState) -> StateMessage:
    """Return the message of a rank's state: all that decisions read, but of the queue the first sequences only."""
    state = rank.state
    movable = {item.sequence.sequence_id: item for item in (*rank.queued, *rank.ready)}
    return StateMessage(
        queued=[_row_of(sequence, movable.get(sequence.sequence_id)) for sequence in state.queued[:MOST_QUEUED]],
        ready=[_row_of(sequence, movable.get(sequence.sequence_id)) for sequence in state.ready],
        running_movable=[_row_of(item.sequence, item) for item in rank.running],
        running=state.running,
        steps=state.steps,
        request_slots=state.request_slots,
        free_request_slots=state.free_request_slots,
        filling=state.filling,
        returning=state.returning,
        total_pages=rank.total_pages,
        free_pages=rank.free_pages,
        overflow_pages=rank.overflow_pages,
        largest=rank.largest,
        grows=rank.grows,
        largest_gap=rank.largest_gap,
        has_waiting=rank.has_waiting,
        capacity=None if rank.capacity is None else (rank.capacity.device, rank.capacity.store, rank.capacity.to_store),
        begun=None if state.begun is None else _row_of(state.begun),
        partition=sorted(rank.partition),
        replicas=rank.replicas,
        takes_replicas=rank.takes_replicas,
        ended=list(rank.ended),
        store=None if rank.store is None else _plain_use(rank.store),
        lacking=rank.lacking,
        device_room=rank.device_room,
        replica_room=rank.replica_room,
        sends_pages=rank.sends_pages,
        held=[HeldRow(copy.sequence_id, copy.source, copy.arrived) for copy in rank.held],
        rates=(rank.rates.sent_per_s, rank.rates.computed_per_s),
    )


def _plain_use(use: StoreUse) -> tuple[int, int, int, bool]:
    return use.total, use.leased, use.kept, use.is_account


def _row_of(sequence: SequenceState, movable: Movable | None = None) -> SequenceRow:
    """Return a sequence as a row of a message, with its tokens and pages where it is movable."""
    return SequenceRow(
        sequence.sequence_id,
        sequence.arrival,
        sequence.prompt_tokens,
        sequence.max_new_tokens,
        sequence.prompt_group,
        sequence.choice,
        -1 if movable is None else movable.tokens,
        -1 if movable is None else movable.pages,
        -1 if movable is None else movable.gap,
        movable is None or movable.replicable,
        -1 if movable is None else movable.leased,
        sequence.shared_tokens,
        sequence.generated_tokens,
        sequence.computed_tokens,
        sequence.expected_tokens,
        sequence.waits_since,
    )


def _sequence_of(row: SequenceRow, status: Status, ranks: frozenset[int]) -> SequenceState:
    return SequenceState(
        sequence_id=row.sequence_id,
        arrival=row.arrival,
        prompt_tokens=row.prompt_tokens,
        max_new_tokens=row.max_new_tokens,
        prompt_group=row.prompt_group,
        choice=row.choice,
        status=status,
        shared_tokens=row.shared_tokens,
        generated_tokens=row.generated_tokens,
        computed_tokens=row.computed_tokens,
        expected_tokens=row.expected_tokens,
        waits_since=row.waits_since,
        ranks=ranks,
    )


def state_of(message: StateMessage, rank: int) -> RankState:
    """Return the state in a message of `rank`. A state that is sent counts as changed."""
    of = frozenset((rank,))
    ready = [_sequence_of(row, Status.READY, of) for row in message.ready]
    queued = [_sequence_of(row, Status.QUEUED, of) for row in message.queued]
    runs_on = frozenset(message.partition) or of
    running = [_movable_of(row, _sequence_of(row, Status.RUNNING, runs_on)) for row in message.running_movable]
    state = State(
        queued=queued,
        ready=ready,
        running=message.running,
        steps=message.steps,
        request_slots=message.request_slots,
        free_request_slots=message.free_request_slots,
        filling=message.filling,
        returning=message.returning,
        begun=None if message.begun is None else _sequence_of(message.begun, Status.PREFILLING, of),
    )
    return RankState(
        state=state,
        total_pages=message.total_pages,
        free_pages=message.free_pages,
        overflow_pages=message.overflow_pages,
        largest=message.largest,
        grows=message.grows,
        largest_gap=message.largest_gap,
        has_waiting=message.has_waiting,
        capacity=None if message.capacity is None else _capacity_of(*message.capacity),
        ready=_movables_of(message.ready, ready),
        running=running,
        partition=frozenset(message.partition),
        replicas=message.replicas,
        takes_replicas=message.takes_replicas,
        ended=tuple(message.ended),
        store=None if message.store is None else _use_of(*message.store),
        lacking=message.lacking,
        device_room=message.device_room,
        replica_room=message.replica_room,
        sends_pages=message.sends_pages,
        held=tuple(HeldCopy(sequence_id=r.sequence_id, source=r.source, arrived=r.arrived) for r in message.held),
        queued=tuple(_movables_of(message.queued, queued)),
        rates=MoveRates(sent_per_s=message.rates[0], computed_per_s=message.rates[1]),
    )


def _movables_of(rows: list[SequenceRow], sequences: list[SequenceState]) -> list[Movable]:
    return [_movable_of(row, sequence) for row, sequence in zip(rows, sequences, strict=True) if row.pages >= 0]


def _movable_of(row: SequenceRow, sequence: SequenceState) -> Movable:
    numbers = {"tokens": row.tokens, "pages": row.pages, "gap": row.gap, "leased": row.leased}
    return Movable(sequence=sequence, **numbers, replicable=row.replicable)


def _use_of(total: int, leased: int, kept: int, is_account: bool) -> StoreUse:
    return StoreUse(total=total, leased=leased, kept=kept, is_account=is_account)


def _capacity_of(device: int | None, store: int, to_store: bool) -> TierCapacity:
    return TierCapacity(device=device, store=store, to_store=to_store)


def actions_for(decision: GroupDecision, rank: int) -> BoundaryActions:
    """Return the part of `rank` in a decision."""
    action = decision.actions[rank][-1]  # after the actions that are the same on all ranks
    units = action.units if isinstance(action, Prefill) else ()
    lease = decision.leases[rank] if decision.leases else None
    return BoundaryActions(
        prefill=decision.prefill,
        busy=decision.busy,
        expert_calls=decision.expert_calls,
        moves=[MoveRow(*astuple(move)) for move in decision.moves],
        copies=[CopyRow(*astuple(copy)) for copy in decision.copies],
        units=[[member.sequence_id for member in unit.members] for unit in units],
        refill=[sequence.sequence_id for sequence in action.sequences] if isinstance(action, Refill) else [],
        ends=[sorted(end.ranks) for end in decision.ends],
        partitions=[_partition_row(partition) for partition in decision.partitions],
        held=rank in decision.held,
        lease=None if lease is None else (lease.blocks, lease.admits),
    )


def _partition_row(partition: Partition) -> PartitionRow:
    owners = [next(iter(sequence.ranks)) for sequence in partition.sequences]
    return PartitionRow([one.sequence_id for one in partition.sequences], owners, sorted(partition.ranks))


def moves_of(message: BoundaryActions) -> list[Move]:
    """Return the moves of a boundary."""
    return [
        Move(
            sequence_id=row.sequence_id,
            source=row.source,
            target=row.target,
            prepared=row.prepared,
            as_tokens=row.as_tokens,
        )
        for row in message.moves
    ]


def copies_of(message: BoundaryActions) -> list[EarlyCopy]:
    """Return the copies that begin at a boundary."""
    return [
        EarlyCopy(
            sequence_id=row.sequence_id,
            source=row.source,
            target=row.target,
            full_pages=row.full_pages,
            pages=row.pages,
            gap=row.gap,
        )
        for row in message.copies
    ]
