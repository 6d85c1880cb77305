"""Decides which rank of a node runs a waiting sequence whose KV lies in the node's store.

Theory. All ranks of a node read its store, so that a waiting sequence changes its rank without a copy. It therefore
waits for a place on any of them: the sequence of the node that waits longest comes first, whichever rank holds it, and
goes to the rank that runs the fewest, or stays where that makes no difference. A sequence for which no rank has room
blocks those behind it on its own rank, so that its rank gets room for it at last; other ranks go on. One that may not
leave its rank blocks there alone: those behind it may still leave.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heapreplace
from itertools import takewhile

from sgl_batch.core.rank_moves import Move
from sgl_batch.core.rank_state import Movable
from sgl_batch.core.sequence import SequenceState


@dataclass(slots=True, kw_only=True)
class Room:
    """What a rank has for waiting sequences at a boundary, less with each that is dealt to it.

    active: sequences that run there, or will.
    rows: how many more may run.
    pages: pages of the device that they can have.
    account_pages: pages of its account of admission that are free or kept for the largest gap.
    largest_gap: the most pages that one of its sequences can need beyond its reservation.
    takes: whether it takes sequences of other ranks.
    """

    active: int
    rows: int
    pages: int
    account_pages: int
    largest_gap: int = 0
    takes: bool = True

    def has_place(self, waiter: Waiter) -> bool:
        """Return whether a sequence can run here from this boundary on."""
        return self.rows > 0 and waiter.pages <= self.pages

    def accepts(self, item: Movable) -> bool:
        """Return whether the account has room for a sequence of another rank."""
        return self.takes and item.new_pages + max(self.largest_gap, item.gap) <= self.account_pages

    def run(self, waiter: Waiter) -> None:
        """Give a sequence its place."""
        self.active += 1
        self.rows -= 1
        self.pages -= waiter.pages

    def reserve(self, item: Movable) -> None:
        """Give a sequence of another rank its pages of the account. What it brings is not counted: moves may fail."""
        self.account_pages -= max(0, item.new_pages)
        self.largest_gap = max(self.largest_gap, item.gap)


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiter:
    """A sequence that waits on `rank` for `pages` of the device. `item`: what it takes elsewhere; None if it stays."""

    sequence: SequenceState
    rank: int
    pages: int
    item: Movable | None = None

    @property
    def turn(self) -> tuple[int, int]:
        """Orders the sequences of a node by when they began to wait."""
        return self.sequence.waits_since, self.rank


@dataclass(frozen=True, slots=True, kw_only=True)
class Dealt:
    """Moves of waiting sequences, in the order of their turns; and whether all that wait have a place now."""

    moves: tuple[Move, ...]
    all_run: bool


def deal_waiting(rooms: Sequence[Room], waiting: Sequence[Iterable[Waiter]]) -> Dealt:
    """Deal waiting sequences to the ranks of a node.

    Args:
        rooms: by rank; changed to what is left.
        waiting: by rank, its waiting sequences in the order of their turns. Read only as far as ranks have room.
    """
    moves: list[Move] = []
    closed, all_run = set[int](), True
    queues = [iter(of) for of in waiting]
    heads = [(waiter.turn, waiter) for waiter in (next(queue, None) for queue in queues) if waiter is not None]
    heapify(heads)
    while heads:
        _, waiter = heads[0]
        target = _place(rooms, waiter, is_closed=waiter.rank in closed)
        if target is not None:
            rooms[target].run(waiter)
            if target != waiter.rank:
                assert waiter.item is not None, "only a sequence that may leave its rank gets a place elsewhere"
                rooms[target].reserve(waiter.item)
                moves.append(Move(sequence_id=waiter.sequence.sequence_id, source=waiter.rank, target=target))
        else:
            all_run = False
            closed.add(waiter.rank)
        blocks = target is None and (waiter.item is not None or not any(room.rows for room in rooms))
        following = None if blocks else next(queues[waiter.rank], None)
        if following is None:
            heappop(heads)
        else:
            heapreplace(heads, (following.turn, following))
    return Dealt(moves=tuple(moves), all_run=all_run)


def _place(rooms: Sequence[Room], waiter: Waiter, *, is_closed: bool) -> int | None:
    """Return the rank where a sequence runs next, or None. `is_closed`: one before it waits for its own rank."""
    own, item = rooms[waiter.rank], waiter.item
    stays = not is_closed and own.has_place(waiter)
    if item is None or len(item.sequence.ranks) != 1:
        return waiter.rank if stays else None
    others = [
        number
        for number, room in enumerate(rooms)
        if number != waiter.rank and room.has_place(waiter) and room.accepts(item)
    ]
    best = min(others, key=lambda number: rooms[number].active, default=None)
    if stays and (best is None or own.active - rooms[best].active < 1):
        return waiter.rank
    return best


def enter_in_turn(
    waiting: dict[str, SequenceState],
    sequence: SequenceState,
    stays_before: Callable[[SequenceState], bool] = lambda _: False,
) -> None:
    """Enter a sequence among those that wait, by when it began to wait.

    Args:
        waiting: by id, in the order of their turns.
        sequence: the sequence, which began to wait on another rank.
        stays_before: whether a waiting sequence keeps its place before all that come from other ranks.
    """
    since = sequence.waits_since
    behind = list(takewhile(lambda one: one.waits_since > since and not stays_before(one), reversed(waiting.values())))
    for one in behind:
        del waiting[one.sequence_id]
    waiting[sequence.sequence_id] = sequence
    waiting.update((one.sequence_id, one) for one in reversed(behind))
