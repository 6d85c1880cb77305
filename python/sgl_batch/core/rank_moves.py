"""Decides which sequences change their rank at a boundary to even out the ranks' counts."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from sgl_batch.core.actions import Actions, Migrate
from sgl_batch.core.arrival_room import ArrivalRoom
from sgl_batch.core.plan import Plan
from sgl_batch.core.rank_state import Movable, RankState

# More pages than any account has.
_NOTHING_MOVES = 1 << 62


class Migration(enum.Enum):
    """Which sequences change their rank at a boundary. EVEN evens out counts.

    For tests: ALWAYS moves all that can; PARTITION moves none, partitions all that can be, and ends that at the next.
    """

    EVEN = "even"
    NEVER = "never"
    ALWAYS = "always"
    PARTITION = "partition"


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """One sequence moves from rank `source` to rank `target`; a Migrate consists of such moves."""

    sequence_id: str
    source: int
    target: int


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
        named = _movable_by_name(ranks[source])
        sequences = tuple(named[move.sequence_id].sequence for move in together)
        made.append(Migrate(sequences=sequences, source=source, target=target))
    return tuple(made)


def _movable_by_name(rank: RankState) -> dict[str, Movable]:
    return {item.sequence.sequence_id: item for item in (*rank.ready, *rank.running)}


@dataclass(slots=True, kw_only=True)
class _Load:
    """What a rank has while moves are planned: its sequences, and room for more.

    total: all its sequences.
    movable: those that may leave, in the order in which they are moved.
    room: its room for sequences that arrive.
    free_rows: how many more it would decode at once; 0 if it has a queue, whose head may wait for the very pages that
        a sequence of another rank would take.
    least_pages: no sequence of `movable` takes fewer new pages.
    """

    total: int
    movable: list[Movable]
    room: ArrivalRoom
    free_rows: int
    least_pages: int

    @property
    def takes(self) -> bool:
        """Whether it takes any sequence that fits."""
        return self.free_rows > 0 and self.room.request_slots > 0 and not self.room.has_waiting


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
        if not target.takes or target.room.pages < least:
            continue
        for other in reversed(by_total):
            source = loads[other]
            if source.total - target.total < 2:
                break
            if target.room.pages < source.least_pages:
                continue
            item = next((item for item in source.movable if target.room.fits(item)), None)
            if item is not None:
                return _move(loads, item, other, number)
    return None


def _load_of(rank: RankState, plan: Plan) -> _Load:
    state = rank.state
    active = rank.num_resident
    running = sorted(rank.running, key=lambda item: (item.tokens, item.sequence.arrival))
    movable = [item for item in (*rank.ready, *running) if len(item.sequence.ranks) == 1]
    return _Load(
        total=active + len(state.queued) + (state.begun is not None),
        movable=movable,
        room=ArrivalRoom.of(rank, plan.page_size),
        free_rows=0 if state.queued else plan.decode.b_moe - active,
        least_pages=min((item.new_pages for item in movable), default=_NOTHING_MOVES),
    )


def _move(loads: list[_Load], item: Movable, source: int, target: int) -> Move:
    loads[source].movable.remove(item)
    loads[source].total -= 1
    loads[target].total += 1
    loads[target].room.take(item)
    loads[target].free_rows -= 1
    return Move(sequence_id=item.sequence.sequence_id, source=source, target=target)


def _move_all(loads: list[_Load]) -> tuple[Move, ...]:
    """Move every sequence that fits to the next rank. Sequences that leave make no room before the next boundary."""
    moves = []
    for source, load in enumerate(loads):
        target = (source + 1) % len(loads)
        for item in list(load.movable):
            if loads[target].room.fits(item):
                moves.append(_move(loads, item, source, target))
    return tuple(moves)
