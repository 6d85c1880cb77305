"""Decides for a group of ranks: the phase that all run next, each rank's part in it, and which sequences move.

Pure, as the decisions for one rank in `page_boundary`, of which these are made: the ranks run their steps together, so
that they never stand in different exchanges. Who gathers the states and hands out the orders is not decided here.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from sgl_batch.core.actions import Actions, Idle, Migrate, Prefill, Refill
from sgl_batch.core.exclusive import TierCapacity
from sgl_batch.core.page_boundary import BoundaryAction, State, decide_at_boundary, prefill_units
from sgl_batch.core.page_ledger import PageLedger
from sgl_batch.core.plan import Plan, num_expert_calls
from sgl_batch.core.sequence import SequenceState


class StepKind(enum.Enum):
    """What all ranks do next. FORKS: prefill the choices whose leader has just computed their prompt."""

    IDLE = "idle"
    DECODE = "decode"
    BOUNDARY = "boundary"
    FORKS = "forks"


class Migration(enum.Enum):
    """Which sequences change their rank at a boundary. ALWAYS moves everything that can: for tests."""

    EVEN = "even"
    NEVER = "never"
    ALWAYS = "always"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankHeader:
    """What a rank says of itself before each step: sequences that run, that wait, and that wait as forks.

    `due`: whether this rank alone would have a boundary now. `plan_changes`: how many changes (of the plan, of weights,
    pauses) have reached it since start; all ranks get the same ones, each at its own moment.
    """

    running: int
    waiting: int
    forked: int
    due: bool
    plan_changes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupStep:
    """One step of the group, and how many expert calls a layer takes in it on every rank.

    `plan_changes`: how many changes are in force from the next step on, because all ranks know them.
    `any_rank_decodes`: whether any rank has sequences to decode, which a rank that waits for copies would hold up.
    """

    kind: StepKind
    expert_calls: int = 1
    plan_changes: int = 0
    any_rank_decodes: bool = False


def next_step(headers: Sequence[RankHeader], plan: Plan) -> GroupStep:
    """The step that all ranks take under `plan`, which is in force on all of them."""
    known = min(header.plan_changes for header in headers)
    runs = any(header.running for header in headers)
    return replace(_next_step(headers, plan), plan_changes=known, any_rank_decodes=runs)


def _next_step(headers: Sequence[RankHeader], plan: Plan) -> GroupStep:
    """A rank that waits while nobody runs makes a boundary, due or not."""
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
    """Whether a rank would have a boundary now. Unlike a lone rank, one without runners may wait for the others."""
    if state.urgent or state.steps >= plan.boundary_tokens:
        return state.running > 0
    waiting = len(state.ready) + len(state.queued)
    if not (state.changed and waiting):
        return False
    return state.running * 2 <= plan.decode.b_moe and waiting >= state.running


@dataclass(frozen=True, slots=True, kw_only=True)
class Movable:
    """A sequence that may change its rank: one that waits or runs, with `tokens` of KV and `pages` reserved for it.

    One that belongs to several ranks stays with them.
    """

    sequence: SequenceState
    tokens: int
    pages: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RankState:
    """A rank at a boundary: its own state, its account of pages for admission, and what may leave it.

    `overflow_pages`, `largest` and `capacity` are of use where a page lies on the device or in the store alone.
    """

    state: State
    total_pages: int
    free_pages: int
    overflow_pages: int = 0
    largest: int = 0
    capacity: TierCapacity | None = None
    ready: Sequence[Movable] = ()
    running: Sequence[Movable] = ()

    def ledger(self, page_size: int) -> PageLedger:
        """The account as `page_boundary` wants it: what is reserved has no names."""
        ledger = PageLedger(self.total_pages, page_size, overflow_pages=self.overflow_pages)
        if self.largest:
            ledger.reserve("largest", self.largest)
        ledger.add_prompt_pages(ledger.free_pages - self.free_pages)
        return ledger


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """A sequence goes from rank `source` to rank `target`: a Migrate as it is carried out, one by one."""

    sequence_id: str
    source: int
    target: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupDecision:
    """What each rank does, in order: all of them every Migrate, then each its own part. `busy`: any rank has rows."""

    actions: tuple[Actions, ...]
    busy: bool
    prefill: bool
    expert_calls: int

    @property
    def moves(self) -> tuple[Move, ...]:
        """The moves of all ranks, one sequence each."""
        migrates = (action for action in self.actions[0] if isinstance(action, Migrate))
        return tuple(
            Move(sequence_id=sequence.sequence_id, source=migrate.source, target=migrate.target)
            for migrate in migrates
            for sequence in migrate.sequences
        )


def decide_group(ranks: Sequence[RankState], plan: Plan, migration: Migration) -> GroupDecision:
    """What every rank does at a boundary. All prefill or all decode: a rank without a part takes part with no rows."""
    actions = [_at_boundary(rank, plan) for rank in ranks]
    if any(isinstance(action, Prefill) for action in actions):
        return _prefill_phase(ranks, actions, plan)
    moves = plan_moves(ranks, plan, migration)
    decoding = _decoding(ranks, moves)
    actions = [_at_boundary(rank, plan) for rank in decoding]
    rows = max(_decode_rows(rank, action) for rank, action in zip(decoding, actions, strict=True))
    # A move may fail, and its source then has more rows than is planned here, up to a whole group.
    most = max(rows, plan.decode.b_moe, *(rank.state.running for rank in ranks)) if moves else rows
    calls = num_expert_calls(most, plan.decode)
    migrates = _migrates(ranks, moves)
    lists: tuple[Actions, ...] = tuple((*migrates, action) for action in actions)
    return GroupDecision(actions=lists, busy=rows > 0, prefill=False, expert_calls=calls)


def _migrates(ranks: Sequence[RankState], moves: Sequence[Move]) -> tuple[Migrate, ...]:
    """The moves as actions: one for moves in a row between the same two ranks."""
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


def _prefill_phase(ranks: Sequence[RankState], actions: list[BoundaryAction], plan: Plan) -> GroupDecision:
    """Ranks that could decode on prefill along where they have room, rather than wait for those that must."""
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
    return GroupDecision(actions=tuple((part,) for part in parts), busy=True, prefill=True, expert_calls=calls)


def _prefill_rows(action: BoundaryAction) -> int:
    if not isinstance(action, Prefill):
        return 0
    return sum(unit.leader.prefill_rows for unit in action.units) + (action.rest.tokens if action.rest else 0)


@dataclass(slots=True, kw_only=True)
class _Load:
    """What a rank has while moves are planned: sequences of every kind, and room for more.

    `open_places`: how many more it would decode at once; none where it has a queue of its own, whose head may be
    waiting for just the pages that somebody else would take. `free_tokens`: for which the store has pages, where those
    are not part of `free_pages`.
    """

    total: int
    movable: list[Movable]
    free_pages: int
    free_tokens: int | None
    free_request_slots: int
    open_places: int

    def fits(self, item: Movable) -> bool:
        stored = self.free_tokens is None or item.tokens <= self.free_tokens
        return self.free_request_slots > 0 and item.pages <= self.free_pages and stored


def plan_moves(ranks: Sequence[RankState], plan: Plan, migration: Migration) -> tuple[Move, ...]:
    """Moves that even out how many sequences the ranks have: READY ones first, then those with the least KV."""
    if migration is Migration.NEVER or len(ranks) < 2:
        return ()
    loads = [_load_of(rank, plan) for rank in ranks]
    if migration is Migration.ALWAYS:
        return _move_all(loads)
    moves: list[Move] = []
    while (move := _evening_move(loads)) is not None:
        moves.append(move)
    return tuple(moves)


def _evening_move(loads: list[_Load]) -> Move | None:
    """A move from the fullest rank to the emptiest that can make one, if it leaves them less uneven."""
    by_total = sorted(range(len(loads)), key=lambda rank: loads[rank].total)
    for target in by_total:
        if loads[target].open_places <= 0:
            continue
        for source in reversed(by_total):
            if loads[source].total - loads[target].total < 2:
                break
            item = next((item for item in loads[source].movable if loads[target].fits(item)), None)
            if item is not None:
                return _move(loads, item, source, target)
    return None


def _load_of(rank: RankState, plan: Plan) -> _Load:
    state = rank.state
    active = state.running + len(state.ready) + state.returning
    running = sorted(rank.running, key=lambda item: (item.tokens, item.sequence.arrival))
    return _Load(
        total=active + len(state.queued) + (state.begun is not None),
        movable=[item for item in (*rank.ready, *running) if len(item.sequence.ranks) == 1],
        free_pages=rank.free_pages,
        free_tokens=None if rank.capacity is None else rank.capacity.store * plan.page_size,
        free_request_slots=state.free_request_slots,
        open_places=0 if state.queued else plan.decode.b_moe - active,
    )


def _move(loads: list[_Load], item: Movable, source: int, target: int) -> Move:
    loads[source].movable.remove(item)
    loads[source].total -= 1
    loads[target].total += 1
    loads[target].free_pages -= item.pages
    left = loads[target].free_tokens
    if left is not None:
        loads[target].free_tokens = left - item.tokens
    loads[target].free_request_slots -= 1
    loads[target].open_places -= 1
    return Move(sequence_id=item.sequence.sequence_id, source=source, target=target)


def _move_all(loads: list[_Load]) -> tuple[Move, ...]:
    """Everything that fits goes to the next rank; what leaves makes no room before the next boundary."""
    moves = []
    for source, load in enumerate(loads):
        target = (source + 1) % len(loads)
        for item in list(load.movable):
            if loads[target].fits(item):
                moves.append(_move(loads, item, source, target))
    return tuple(moves)


def _decoding(ranks: Sequence[RankState], moves: Sequence[Move]) -> list[RankState]:
    """What each rank has to decode when the moves have been made: who runs there, and who is READY.

    Without its queue: with room that moves have made it might prefill, and on that the next boundary decides.
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
