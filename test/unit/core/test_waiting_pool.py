"""Which rank of a node runs a waiting sequence: rule by rule, and by random nodes."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sequence_builders import sequence

from sgl_batch.core.rank_moves import Move
from sgl_batch.core.rank_state import Movable
from sgl_batch.core.sequence import SequenceState, Status
from sgl_batch.core.waiting_pool import Dealt, Room, Waiter, deal_waiting, enter_in_turn


def waits(since: int, rank: int = 0, *, pages: int = 1, stays: bool = False, gap: int = 0) -> Waiter:
    one = sequence(since, status=Status.SUSPENDED)
    one.sequence_id, one.waits_since, one.ranks = f"{rank}.{since}", since, frozenset((rank,))
    item = Movable(sequence=one, tokens=8 * pages, pages=pages, leased=pages, gap=gap)
    return Waiter(sequence=one, rank=rank, pages=pages, item=None if stays else item)


def room(rows: int = 8, pages: int = 100, *, active: int = 0, account_pages: int = 100, takes: bool = True) -> Room:
    return Room(active=active, rows=rows, pages=pages, account_pages=account_pages, takes=takes)


def dealt(rooms: list[Room], *waiting: Waiter) -> Dealt:
    return deal_waiting(rooms, by_rank(rooms, waiting))


def by_rank(rooms: list[Room], waiting: Sequence[Waiter]) -> list[list[Waiter]]:
    in_turn = sorted(waiting, key=lambda one: one.turn)
    return [[one for one in in_turn if one.rank == rank] for rank in range(len(rooms))]


def moved(rooms: list[Room], *waiting: Waiter) -> list[tuple[str, int]]:
    return [(move.sequence_id, move.target) for move in dealt(rooms, *waiting).moves]


def test_a_sequence_stays_where_it_waits_if_no_rank_runs_fewer():
    assert moved([room(active=2), room(active=2)], waits(1, rank=0), waits(2, rank=1)) == []


def test_a_sequence_goes_to_the_rank_that_runs_the_fewest():
    assert moved([room(active=5), room(active=3), room(active=2)], waits(1)) == [("0.1", 2)]


def test_the_one_that_waits_longest_comes_first_whichever_rank_holds_it():
    rooms = [room(rows=0), room(rows=1)]
    assert moved(rooms, waits(1, rank=0), waits(2, rank=1)) == [("0.1", 1)]


def test_a_sequence_without_room_anywhere_blocks_those_behind_it_on_its_own_rank_alone():
    large, behind, elsewhere = waits(1, pages=50), waits(2), waits(3, rank=1)
    rooms = [room(pages=10), room(pages=20)]
    assert dealt(rooms, large, behind, elsewhere) == Dealt(moves=(), all_run=False)
    assert [one.active for one in rooms] == [0, 1]


def test_sequences_may_leave_from_behind_one_that_may_not():
    bound, behind = waits(1, pages=50, stays=True), waits(2)
    rooms = [room(pages=10), room(pages=20)]
    assert moved(rooms, bound, behind) == [("0.2", 1)]


def test_behind_one_that_waits_for_its_own_rank_none_runs_there():
    bound, behind = waits(1, pages=50, stays=True), waits(2)
    rooms = [room(pages=10), room(pages=0)]
    assert moved(rooms, bound, behind) == []
    assert rooms[0].active == 0


@pytest.mark.parametrize("target", [room(takes=False), room(rows=0), room(pages=0), room(account_pages=4)])
def test_a_rank_takes_no_sequence_for_which_it_lacks_room(target):
    rooms = [room(rows=0), target]
    assert moved(rooms, waits(1, gap=5)) == []


def test_it_is_known_whether_all_have_a_place():
    assert dealt([room(rows=1), room(rows=1)], waits(1), waits(2)).all_run
    assert not dealt([room(rows=1), room(rows=0)], waits(1), waits(2)).all_run


RANKS = 3
WAITERS = st.lists(
    st.tuples(st.integers(0, 9), st.integers(0, RANKS - 1), st.integers(1, 6), st.booleans()), max_size=20
)


@given(
    drawn=WAITERS,
    rows=st.lists(st.integers(0, 6), min_size=RANKS, max_size=RANKS),
    pages=st.lists(st.integers(0, 12), min_size=RANKS, max_size=RANKS),
)
def test_no_room_is_given_twice_and_none_is_left_that_the_oldest_could_have(drawn, rows, pages):
    waiting = [waits(since, rank, pages=need, stays=stays) for since, rank, need, stays in sorted(drawn)]
    for number, one in enumerate(waiting):
        one.sequence.sequence_id = f"s{number}"
    rooms = [room(rows=r, pages=p) for r, p in zip(rows, pages, strict=True)]
    found = deal_waiting(rooms, by_rank(rooms, waiting))
    assert all(one.rows >= 0 and one.pages >= 0 and one.account_pages >= 0 for one in rooms)
    assert sum(before - one.rows for before, one in zip(rows, rooms, strict=True)) == sum(one.active for one in rooms)
    by_name = {one.sequence.sequence_id: one for one in waiting}
    for move in found.moves:
        assert by_name[move.sequence_id].item is not None
        assert move.source == by_name[move.sequence_id].rank != move.target
    if waiting and waiting[0].item is not None and not found.moves and not any(one.active for one in rooms):
        assert all(r == 0 or p < waiting[0].pages for r, p in zip(rows, pages, strict=True))


def turns(*numbers: int) -> dict[str, SequenceState]:
    return {one.sequence_id: one for one in (waits(number).sequence for number in numbers)}


@given(st.lists(st.integers(0, 50), unique=True), st.integers(51, 60) | st.integers(-5, -1))
def test_a_sequence_that_arrives_keeps_its_turn(numbers, since):
    waiting = turns(*sorted(numbers))
    enter_in_turn(waiting, waits(since).sequence)
    assert [one.waits_since for one in waiting.values()] == sorted([*numbers, since])


def test_a_sequence_that_arrives_comes_behind_those_that_stay_before_all():
    waiting = turns(5, 7, 8, 9)
    enter_in_turn(waiting, waits(3).sequence, lambda one: one.waits_since < 8)
    assert [one.waits_since for one in waiting.values()] == [5, 7, 3, 8, 9]


def test_moves_name_both_ranks():
    assert dealt([room(rows=0), room()], waits(4)).moves == (Move(sequence_id="0.4", source=0, target=1),)
