"""Decides which sequences change their rank at a boundary to even out counts, and which moves copies prepare first."""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from sgl_batch.core.actions import Actions, Migrate
from sgl_batch.core.arrival_room import ArrivalRoom
from sgl_batch.core.early_copies import EarlyCopy, least_worth_preparing, within_limits
from sgl_batch.core.move_costs import moves_as_tokens
from sgl_batch.core.plan import Plan
from sgl_batch.core.rank_state import Movable, RankState, movable_by_name
from sgl_batch.core.sequence import Status

# More pages than any account has.
_NOTHING_MOVES = 1 << 62


class Migration(enum.Enum):
    """Which sequences change their rank at a boundary. EVEN evens out counts.

    For tests: ALWAYS moves all that can at once, PREPARED all that can after early copies, and AS_TOKENS all that are
    queued or running, without their KV; PARTITION moves none, partitions all that can be, and ends that at the next.
    """

    EVEN = "even"
    NEVER = "never"
    ALWAYS = "always"
    PREPARED = "prepared"
    AS_TOKENS = "as-tokens"
    PARTITION = "partition"

    @property
    def moves_all(self) -> bool:
        """Whether all sequences move that can."""
        return self in (Migration.ALWAYS, Migration.PREPARED, Migration.AS_TOKENS)

    @property
    def is_for_tests(self) -> bool:
        """Whether it takes the place of the callbacks."""
        return self.moves_all or self is Migration.PARTITION


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """One sequence moves from rank `source` to rank `target`; a Migrate consists of such moves.

    `prepared`: the target holds a copy of its first pages. `as_tokens`: it moves without KV, and is queued there.
    """

    sequence_id: str
    source: int
    target: int
    prepared: bool = False
    as_tokens: bool = False


def moves_of(actions: Actions) -> tuple[Move, ...]:
    """Return the moves of these actions, one for each sequence."""
    return tuple(
        Move(sequence_id=sequence.sequence_id, source=action.source, target=action.target)
        for action in actions
        if isinstance(action, Migrate)
        for sequence in action.sequences
    )


def as_migrates(ranks: Sequence[RankState], moves: Sequence[Move]) -> tuple[Migrate, ...]:
    """Return the moves as actions, one action for consecutive moves between the same two ranks."""
    made = []
    for (source, target), together in groupby(moves, key=lambda move: (move.source, move.target)):
        named = movable_by_name(ranks[source])
        sequences = tuple(named[move.sequence_id].sequence for move in together)
        made.append(Migrate(sequences=sequences, source=source, target=target))
    return tuple(made)


def with_moves(actions: Actions, migrates: Sequence[Migrate]) -> Actions:
    """Return the actions with these moves instead of theirs, where those begin."""
    first = next((place for place, action in enumerate(actions) if isinstance(action, Migrate)), len(actions))
    others = [action for action in actions[first:] if not isinstance(action, Migrate)]
    return (*actions[:first], *migrates, *others)


@dataclass(slots=True, kw_only=True)
class _Load:
    """What a rank has while moves are planned: its sequences, and room for more.

    total: all its sequences.
    movable: those that may leave, in the order in which they are moved.
    room: its room for sequences that arrive.
    free_rows: how many more it would decode at once; 0 if it has a queue, whose head may wait for the very pages that
        a sequence of another rank would take.
    least_pages: no sequence of `movable` takes fewer new pages.
    prompts: how many queued sequences it would prefill at the next boundary.
    """

    total: int
    movable: list[Movable]
    room: ArrivalRoom
    free_rows: int
    least_pages: int
    prompts: int

    @property
    def takes(self) -> bool:
        """Whether it takes any sequence that fits."""
        return self.free_rows > 0 and self.room.request_slots > 0 and not self.room.has_waiting

    def fits(self, item: Movable) -> bool:
        """Return whether it has room for a sequence; for a queued one only where it would be prefilled next."""
        begins = item.sequence.status is not Status.QUEUED or self.prompts >= 1
        return begins and self.room.fits(item)


def plan_moves(ranks: Sequence[RankState], plan: Plan, migration: Migration) -> tuple[Move, ...]:
    """Return moves that even out the ranks' numbers of sequences.

    First move the sequences of which the target holds a copy, then queued ones, which have no KV, to ranks that would
    prefill them next; then others that wait, then running ones with the least KV.
    """
    if migration in (Migration.NEVER, Migration.PARTITION) or len(ranks) < 2:
        return ()
    loads = [_load_of(rank, plan) for rank in ranks]
    moves = _prepared_moves(ranks, loads, migration)
    held = {copy.sequence_id for rank in ranks for copy in rank.held}
    for load in loads if held else ():
        load.movable = [item for item in load.movable if item.sequence.sequence_id not in held]
    if migration.moves_all:
        return (*moves, *_move_all(loads, but=Status.READY if migration is Migration.AS_TOKENS else None))
    while (move := _evening_move(loads)) is not None:
        moves.append(move)
    return tuple(moves)


def _prepared_moves(ranks: Sequence[RankState], loads: list[_Load], migration: Migration) -> list[Move]:
    """Return the moves whose copies have arrived. The target has reserved their pages."""
    moves = []
    for target, rank in enumerate(ranks):
        for copy in rank.held:
            source = loads[copy.source]
            item = next((item for item in source.movable if item.sequence.sequence_id == copy.sequence_id), None)
            if not copy.arrived or item is None or not loads[target].fits(item):
                continue
            if migration.moves_all or (loads[target].takes and source.total - loads[target].total >= 2):
                moves.append(_move(loads, item, copy.source, target))
    return moves


def _evening_move(loads: list[_Load]) -> Move | None:
    """Return a move from the fullest possible rank to the emptiest, if it leaves them less uneven; else None."""
    by_total = sorted(range(len(loads)), key=lambda rank: loads[rank].total)
    least = min(load.least_pages for load in loads)
    for number in by_total:
        target = loads[number]
        if not target.takes or target.room.pages < least:
            continue
        for other in reversed(by_total):
            source = loads[other]
            if source.total - target.total < 2:
                break
            if target.room.pages < source.least_pages:
                continue
            item = next((item for item in source.movable if target.fits(item)), None)
            if item is not None:
                return _move(loads, item, other, number)
    return None


def _load_of(rank: RankState, plan: Plan) -> _Load:
    state = rank.state
    active = rank.num_resident
    running = sorted(rank.running, key=lambda item: (item.tokens, item.sequence.arrival))
    movable = [item for item in (*rank.queued, *rank.ready, *running) if len(item.sequence.ranks) == 1]
    return _Load(
        total=active + len(state.queued) + (state.begun is not None),
        movable=movable,
        room=ArrivalRoom.of(rank, plan.page_size),
        free_rows=0 if state.queued else plan.decode.b_moe - active,
        least_pages=min((item.new_pages for item in movable), default=_NOTHING_MOVES),
        prompts=_prompts_wanted(rank, plan),
    )


def _prompts_wanted(rank: RankState, plan: Plan) -> int:
    """Return how many sequences a rank without a queue lacks, so that it would prefill those that come."""
    return 0 if rank.state.queued else max(0, int(plan.refill_watermark * plan.decode.b_moe) - rank.num_resident)


def _move(loads: list[_Load], item: Movable, source: int, target: int) -> Move:
    loads[source].movable.remove(item)
    loads[source].total -= 1
    loads[target].total += 1
    loads[target].room.take(item)
    loads[target].free_rows -= 1
    loads[target].prompts -= 1
    return Move(sequence_id=item.sequence.sequence_id, source=source, target=target)


def _move_all(loads: list[_Load], *, but: Status | None) -> tuple[Move, ...]:
    """Move every sequence that fits to the next rank, but those with this status, for which a move is no progress.

    Sequences that leave make no room before the next boundary.
    """
    moves = []
    for source, load in enumerate(loads):
        target = (source + 1) % len(loads)
        for item in list(load.movable):
            if loads[target].fits(item) and item.sequence.status is not but:
                moves.append(_move(loads, item, source, target))
    return tuple(moves)


def in_phases(
    ranks: Sequence[RankState], moves: Sequence[Move], plan: Plan, migration: Migration, evening: Sequence[Migrate] = ()
) -> tuple[tuple[Move, ...], tuple[EarlyCopy, ...]]:
    """Return the moves to make now, and copies that prepare others. Those follow when all of their pages are there.

    Of the moves, those that even out counts (`evening`) may be made without KV. What a callback thinks of keeps its KV:
    it may move the same sequence at each boundary, which would then be computed anew each time.

    No copy begins while others are under way, and a sequence of which a copy is under way does not move. Where no rank
    decodes, a move holds up nothing, and comes now. A move as tokens comes now too.
    """
    prepares = migration is not Migration.ALWAYS and any(rank.state.running for rank in ranks)
    least = 1 if migration is Migration.PREPARED else least_worth_preparing(plan)
    arrived = {(copy.sequence_id, target) for target, rank in enumerate(ranks) for copy in rank.held if copy.arrived}
    under_way = {copy.sequence_id for rank in ranks for copy in rank.held if not copy.arrived}
    prompts = Counter({rank: _prompts_wanted(state, plan) for rank, state in enumerate(ranks)})
    even = {*moves_of(tuple(evening))}
    now, wanted = [], []
    for move in moves:
        source, item = ranks[move.source], movable_by_name(ranks[move.source])[move.sequence_id]
        if (move.sequence_id, move.target) in arrived:
            now.append(replace(move, prepared=True))
        elif move.sequence_id in under_way:
            continue
        elif _goes_as_tokens(item, source, migration, may_recompute=move in even and prompts[move.target] >= 1):
            prompts[move.target] -= 1
            now.append(replace(move, as_tokens=True))
        elif prepares and source.sends_pages and item.tokens // plan.page_size >= least:
            wanted.append(_copy_for(move, item, plan))
        else:
            now.append(move)
    return tuple(now), () if under_way else within_limits(wanted)


def _goes_as_tokens(item: Movable, source: RankState, migration: Migration, *, may_recompute: bool) -> bool:
    """Return whether a sequence moves without KV: it has none, or its next rank computes it sooner than it is sent."""
    if item.sequence.status is Status.QUEUED:
        return True
    if not source.sends_pages:
        return False
    return migration is Migration.AS_TOKENS or (may_recompute and moves_as_tokens(item.tokens, source.rates))


def _copy_for(move: Move, item: Movable, plan: Plan) -> EarlyCopy:
    return EarlyCopy(
        sequence_id=move.sequence_id,
        source=move.source,
        target=move.target,
        full_pages=item.tokens // plan.page_size,
        pages=item.pages,
        gap=item.gap,
    )
