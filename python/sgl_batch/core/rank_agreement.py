"""Decides for a group of ranks: the phase that all run next, each rank's part in it, and which sequences migrate.

The ranks run their steps together, so that they always call the same collectives. Decisions are pure and made of those
for one rank in `page_boundary`. managers/rank_group gathers the states and sends each rank its actions.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from sgl_batch.core.actions import Actions, EndPartition, Idle, Migrate, Partition, Prefill, Refill
from sgl_batch.core.admission_policy import RESERVE, AsNoted
from sgl_batch.core.exclusive import TierCapacity
from sgl_batch.core.page_boundary import BoundaryAction, State, decide_at_boundary, prefill_units
from sgl_batch.core.page_ledger import PageLedger
from sgl_batch.core.partition import anything_waits, at_every_other_boundary, ends_of, without_replicas
from sgl_batch.core.plan import Plan, num_expert_calls
from sgl_batch.core.sequence import SequenceState

# How many queued sequences a rank sends at a boundary: enough for any prefill group, and few of a queue of millions.
MOST_QUEUED = 2048
# More pages than any account has.
_NOTHING_MOVES = 1 << 62


class StepKind(enum.Enum):
    """What all ranks do next. FORKS: they prefill the choices whose leader has just computed their prompt."""

    IDLE = "idle"
    DECODE = "decode"
    BOUNDARY = "boundary"
    FORKS = "forks"


class Migration(enum.Enum):
    """Which sequences change their rank at a boundary. EVEN evens out counts.

    For tests: ALWAYS moves all that can; PARTITION moves none, partitions all that can be, and ends that at the next.
    """

    EVEN = "even"
    NEVER = "never"
    ALWAYS = "always"
    PARTITION = "partition"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankHeader:
    """What a rank sends before each step: how many of its sequences run, wait, and wait as forks.

    `due`: whether this rank by itself would have a boundary now. `plan_changes`: how many changes (of the plan, of
    weights, pauses) have reached it since start. All ranks get the same changes, but not at the same moment.
    """

    running: int
    waiting: int
    forked: int
    due: bool
    plan_changes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupStep:
    """One step of all ranks.

    expert_calls: how many expert calls a layer takes, on every rank.
    plan_changes: how many changes are in force from the next step on, because they have reached all ranks.
    any_rank_decodes: whether any rank has sequences to decode; a rank that waits for copies would hold them up.
    """

    kind: StepKind
    expert_calls: int = 1
    plan_changes: int = 0
    any_rank_decodes: bool = False


def next_step(headers: Sequence[RankHeader], plan: Plan) -> GroupStep:
    """Return the step that all ranks take under `plan`, which is in force on all of them."""
    known = min(header.plan_changes for header in headers)
    runs = any(header.running for header in headers)
    return replace(_next_step(headers, plan), plan_changes=known, any_rank_decodes=runs)


def _next_step(headers: Sequence[RankHeader], plan: Plan) -> GroupStep:
    """If a rank has waiting sequences and no rank runs any, a boundary comes, due or not."""
    forked = max(header.forked for header in headers)
    if forked:
        rows = min(forked, plan.prefill.b_moe)
        return GroupStep(kind=StepKind.FORKS, expert_calls=num_expert_calls(rows, plan.prefill))
    running = max(header.running for header in headers)
    waiting = any(header.waiting for header in headers)
    if any(header.due for header in headers) or (waiting and not running):
        return GroupStep(kind=StepKind.BOUNDARY)
    if running:
        return GroupStep(kind=StepKind.DECODE, expert_calls=num_expert_calls(running, plan.decode))
    return GroupStep(kind=StepKind.IDLE)


def rank_is_due(state: State, plan: Plan) -> bool:
    """Return whether a rank wants a boundary now. Unlike a single rank, one without runners may wait for the others."""
    if state.urgent or state.steps >= plan.boundary_tokens:
        return state.running > 0
    waiting = len(state.ready) + len(state.queued)
    if not (state.changed and waiting):
        return False
    return state.running * 2 <= plan.decode.b_moe and waiting >= state.running


@dataclass(frozen=True, slots=True, kw_only=True)
class Movable:
    """A waiting or running sequence that may change its rank, with `tokens` of KV.

    It reserves `pages` where it arrives, and can need `gap` more. A sequence that belongs to several ranks stays with
    them. `replicable`: whether it would end at the same step on each of several ranks.
    """

    sequence: SequenceState
    tokens: int
    pages: int
    gap: int = 0
    replicable: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class RankState:
    """A rank at a boundary: its state, its account of pages for admission, and the sequences that may leave it.

    `overflow_pages`, `largest` and `capacity` are for an exclusive store. `grows`, `largest_gap` and `has_waiting` are
    for reservations that grow, as in its `PageLedger`. `ready` and `running`: the waiting and the running sequences
    that may leave. `partition`: the set of ranks that it is partitioned with; empty if it is not. `replicas`: how many
    of its running sequences other ranks own. `takes_replicas`: whether it can be partitioned.
    """

    state: State
    total_pages: int
    free_pages: int
    overflow_pages: int = 0
    largest: int = 0
    grows: bool = False
    largest_gap: int = 0
    has_waiting: bool = False
    capacity: TierCapacity | None = None
    ready: Sequence[Movable] = ()
    running: Sequence[Movable] = ()
    partition: frozenset[int] = frozenset()
    replicas: int = 0
    takes_replicas: bool = True

    @classmethod
    def of(
        cls,
        state: State,
        account: PageLedger,
        capacity: TierCapacity | None,
        movable: tuple[Sequence[Movable], Sequence[Movable]],
        *,
        partition: frozenset[int] = frozenset(),
        replicas: int = 0,
        takes_replicas: bool = True,
    ) -> RankState:
        """Return the state of a rank with this account of admission. `movable`: waiting and running sequences."""
        ready, running = movable
        return cls(
            state=state,
            total_pages=account.total_pages,
            free_pages=account.free_pages,
            overflow_pages=account.overflow_pages,
            largest=account.largest,
            grows=account.policy.grows,
            largest_gap=account.largest_gap,
            has_waiting=account.has_waiting,
            capacity=capacity,
            ready=ready,
            running=running,
            partition=partition,
            replicas=replicas,
            takes_replicas=takes_replicas,
        )

    def ledger(self, page_size: int) -> PageLedger:
        """Return the account as a ledger, in which the reservations have no owners.

        Where reservations grow, a queued sequence reserves what its own rank has noted of it.
        """
        policy = AsNoted() if self.grows else RESERVE
        ledger = PageLedger(self.total_pages, page_size, overflow_pages=self.overflow_pages, policy=policy)
        if self.largest:
            ledger.reserve("largest", self.largest)
        if self.largest_gap:
            ledger.reserve("largest gap", 0, whole=self.largest_gap)
        if self.has_waiting:
            ledger.away.add("waits")
        ledger.add_prompt_pages(ledger.free_pages - self.free_pages)
        return ledger


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """One sequence moves from rank `source` to rank `target`; a Migrate consists of such moves."""

    sequence_id: str
    source: int
    target: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupDecision:
    """What all ranks do at a boundary.

    actions: by rank, its actions in order: every EndPartition, Migrate and Partition of the group, then the rank's own
        action.
    busy: whether any rank has rows to compute.
    prefill: whether the ranks prefill.
    expert_calls: how many expert calls a layer takes in the next pass, on every rank.
    """

    actions: tuple[Actions, ...]
    busy: bool
    prefill: bool
    expert_calls: int

    @property
    def moves(self) -> tuple[Move, ...]:
        """The moves of all ranks, one for each sequence."""
        migrates = (action for action in self.actions[0] if isinstance(action, Migrate))
        return tuple(
            Move(sequence_id=sequence.sequence_id, source=migrate.source, target=migrate.target)
            for migrate in migrates
            for sequence in migrate.sequences
        )

    @property
    def ends(self) -> tuple[EndPartition, ...]:
        """The partitions that end, before anything else is done."""
        return tuple(action for action in self.actions[0] if isinstance(action, EndPartition))

    @property
    def partitions(self) -> tuple[Partition, ...]:
        """The partitions that begin."""
        return tuple(action for action in self.actions[0] if isinstance(action, Partition))


def decide_group(ranks: Sequence[RankState], plan: Plan, migration: Migration) -> GroupDecision:
    """Return what every rank does at a boundary.

    All ranks prefill or all decode: a rank without work takes part with no rows, because exchanges include all ranks.

    Args:
        ranks: the state of each rank, by rank, as gathered at this boundary.
        plan: the plan in force on all ranks.
        migration: which sequences may change their rank.
    """
    long_tail = _long_tail(ranks, plan, migration)
    ends = tuple(action for action in long_tail if isinstance(action, EndPartition))
    ranks = without_replicas(ranks, ends)
    actions = [_at_boundary(rank, plan) for rank in ranks]
    if any(isinstance(action, Prefill) for action in actions):
        return _prefill_phase(ranks, actions, plan, ends)
    partitions = tuple(action for action in long_tail if isinstance(action, Partition))
    moves = plan_moves(ranks, plan, migration)
    decoding = _decoding(ranks, moves)
    actions = [_at_boundary(rank, plan) for rank in decoding]
    rows = max(_decode_rows(rank, action) for rank, action in zip(decoding, actions, strict=True))
    # A move may fail; its source then has more rows than planned here, up to a whole group.
    most = max(rows, plan.decode.b_moe, *(rank.state.running for rank in ranks)) if moves else rows
    calls = num_expert_calls(most, plan.decode)
    migrates = _migrates(ranks, moves)
    lists: tuple[Actions, ...] = tuple((*ends, *migrates, *partitions, action) for action in actions)
    return GroupDecision(actions=lists, busy=rows > 0, prefill=False, expert_calls=calls)


def _long_tail(ranks: Sequence[RankState], plan: Plan, migration: Migration) -> tuple[Partition | EndPartition, ...]:
    """Return which partitions end and which begin: all end as soon as anything waits."""
    ends = ends_of(ranks)
    if ends:
        return ends if migration is Migration.PARTITION or anything_waits(ranks) else ()
    return at_every_other_boundary(ranks, plan) if migration is Migration.PARTITION else ()


def _migrates(ranks: Sequence[RankState], moves: Sequence[Move]) -> tuple[Migrate, ...]:
    """Return the moves as actions, one action for consecutive moves between the same two ranks."""
    made = []
    for (source, target), together in groupby(moves, key=lambda move: (move.source, move.target)):
        named = _movable_by_name(ranks[source])
        sequences = tuple(named[move.sequence_id].sequence for move in together)
        made.append(Migrate(sequences=sequences, source=source, target=target))
    return tuple(made)


def _movable_by_name(rank: RankState) -> dict[str, Movable]:
    return {item.sequence.sequence_id: item for item in (*rank.ready, *rank.running)}


def _at_boundary(rank: RankState, plan: Plan) -> BoundaryAction:
    return decide_at_boundary(rank.state, plan, rank.ledger(plan.page_size), rank.capacity)


def _decode_rows(rank: RankState, action: BoundaryAction) -> int:
    return rank.state.running + (len(action.sequences) if isinstance(action, Refill) else 0)


def _prefill_phase(
    ranks: Sequence[RankState], actions: list[BoundaryAction], plan: Plan, ends: tuple[EndPartition, ...]
) -> GroupDecision:
    """Let ranks that could decode on prefill too, as far as they have room, instead of waiting for those that must."""
    parts: list[BoundaryAction] = []
    for rank, action in zip(ranks, actions, strict=True):
        units = action.units if isinstance(action, Prefill) else ()
        if not units:
            filling = replace(rank.state, filling=True)
            units = tuple(prefill_units(filling, plan, rank.ledger(plan.page_size), rank.capacity))
        rest = rank.state.rest
        parts.append(Prefill(units=units, rest=rest) if units or rest else Idle())
    rows = max(_prefill_rows(part) for part in parts)
    calls = num_expert_calls(rows, plan.prefill)
    return GroupDecision(actions=tuple((*ends, part) for part in parts), busy=True, prefill=True, expert_calls=calls)


def _prefill_rows(action: BoundaryAction) -> int:
    if not isinstance(action, Prefill):
        return 0
    return sum(unit.leader.prefill_rows for unit in action.units) + (action.rest.tokens if action.rest else 0)


@dataclass(slots=True, kw_only=True)
class _Load:
    """What a rank has while moves are planned: its sequences, and room for more.

    total: all its sequences.
    movable: those that may leave, in the order in which they are moved.
    room: pages in the account of admission that are free or kept for the largest gap.
    largest_gap: the most pages that one sequence can need beyond its reservation.
    has_waiting: whether sequences wait there for pages of the account: they come before any that would arrive.
    free_tokens: tokens for which an exclusive store has pages; None without one.
    free_request_slots: how many more sequences it can hold.
    free_rows: how many more it would decode at once; 0 if it has a queue, whose head may wait for the very pages that
        a sequence of another rank would take.
    least_pages: no sequence of `movable` takes fewer pages.
    """

    total: int
    movable: list[Movable]
    room: int
    largest_gap: int
    has_waiting: bool
    free_tokens: int | None
    free_request_slots: int
    free_rows: int
    least_pages: int

    @property
    def takes(self) -> bool:
        """Whether it takes any sequence that fits."""
        return self.free_rows > 0 and self.free_request_slots > 0 and not self.has_waiting

    def fits(self, item: Movable) -> bool:
        stored = self.free_tokens is None or item.tokens <= self.free_tokens
        pages = item.pages + max(self.largest_gap, item.gap)
        return self.free_request_slots > 0 and not self.has_waiting and pages <= self.room and stored


def plan_moves(ranks: Sequence[RankState], plan: Plan, migration: Migration) -> tuple[Move, ...]:
    """Return moves that even out the ranks' numbers of sequences: waiting ones first, then those with the least KV."""
    if migration in (Migration.NEVER, Migration.PARTITION) or len(ranks) < 2:
        return ()
    loads = [_load_of(rank, plan) for rank in ranks]
    if migration is Migration.ALWAYS:
        return _move_all(loads)
    moves: list[Move] = []
    while (move := _evening_move(loads)) is not None:
        moves.append(move)
    return tuple(moves)


def _evening_move(loads: list[_Load]) -> Move | None:
    """Return a move from the fullest possible rank to the emptiest, if it leaves them less uneven; else None."""
    by_total = sorted(range(len(loads)), key=lambda rank: loads[rank].total)
    least = min(load.least_pages for load in loads)
    for number in by_total:
        target = loads[number]
        if not target.takes or target.room < least:
            continue
        for other in reversed(by_total):
            source = loads[other]
            if source.total - target.total < 2:
                break
            if target.room < source.least_pages:
                continue
            item = next((item for item in source.movable if target.fits(item)), None)
            if item is not None:
                return _move(loads, item, other, number)
    return None


def _load_of(rank: RankState, plan: Plan) -> _Load:
    state = rank.state
    active = state.running + len(state.ready) + state.returning
    running = sorted(rank.running, key=lambda item: (item.tokens, item.sequence.arrival))
    movable = [item for item in (*rank.ready, *running) if len(item.sequence.ranks) == 1]
    return _Load(
        total=active + len(state.queued) + (state.begun is not None),
        movable=movable,
        room=rank.free_pages + rank.largest_gap,
        largest_gap=rank.largest_gap,
        has_waiting=rank.has_waiting,
        free_tokens=None if rank.capacity is None else rank.capacity.store * plan.page_size,
        free_request_slots=0 if rank.partition else state.free_request_slots,
        free_rows=0 if state.queued else plan.decode.b_moe - active,
        least_pages=min((item.pages for item in movable), default=_NOTHING_MOVES),
    )


def _move(loads: list[_Load], item: Movable, source: int, target: int) -> Move:
    loads[source].movable.remove(item)
    loads[source].total -= 1
    loads[target].total += 1
    loads[target].room -= item.pages
    loads[target].largest_gap = max(loads[target].largest_gap, item.gap)
    left = loads[target].free_tokens
    if left is not None:
        loads[target].free_tokens = left - item.tokens
    loads[target].free_request_slots -= 1
    loads[target].free_rows -= 1
    return Move(sequence_id=item.sequence.sequence_id, source=source, target=target)


def _move_all(loads: list[_Load]) -> tuple[Move, ...]:
    """Move every sequence that fits to the next rank. Sequences that leave make no room before the next boundary."""
    moves = []
    for source, load in enumerate(loads):
        target = (source + 1) % len(loads)
        for item in list(load.movable):
            if loads[target].fits(item):
                moves.append(_move(loads, item, source, target))
    return tuple(moves)


def _decoding(ranks: Sequence[RankState], moves: Sequence[Move]) -> list[RankState]:
    """Return the states of the ranks after the moves, without their queues.

    With room that the moves have made, a rank might prefill; that is decided at the next boundary.
    """
    decoding = [replace(rank, state=replace(rank.state, queued=(), begun=None)) for rank in ranks]
    for move in moves:
        source, target = decoding[move.source], decoding[move.target]
        item = next(item for item in (*source.ready, *source.running) if item.sequence.sequence_id == move.sequence_id)
        decoding[move.source] = replace(source, state=_without(source.state, item.sequence))
        decoding[move.target] = replace(target, state=replace(target.state, ready=[*target.state.ready, item.sequence]))
    return decoding


def _without(state: State, leaving: SequenceState) -> State:
    ready = [sequence for sequence in state.ready if sequence.sequence_id != leaving.sequence_id]
    was_ready = len(ready) < len(state.ready)
    return replace(state, ready=ready, running=state.running - (not was_ready))
