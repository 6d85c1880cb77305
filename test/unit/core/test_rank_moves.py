"""Which sequences change their rank at a boundary, rule by rule."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rank_builders import PLAN, movable, rank, running
from sequence_builders import sequence

from sgl_batch.core.rank_moves import Migration, plan_moves
from sgl_batch.core.rank_state import RankState
from sgl_batch.core.sequence import Status


def moves(*ranks: RankState, migration: Migration = Migration.EVEN) -> list[tuple[str, int, int]]:
    return [(move.sequence_id, move.source, move.target) for move in plan_moves(ranks, PLAN, migration)]


@pytest.mark.parametrize("migration", Migration)
def test_a_single_rank_moves_nothing(migration):
    assert moves(rank(runs=running(5), ready=[movable(9)]), migration=migration) == []


def test_migration_never_moves_nothing():
    assert moves(rank(runs=running(8)), rank(), migration=Migration.NEVER) == []


def test_ready_sequences_move_before_running_ones():
    source = rank(ready=[movable(8, tokens=90), movable(9, tokens=80)], runs=running(4, tokens=5))
    assert moves(source, rank()) == [("s8", 0, 1), ("s9", 0, 1), ("s0", 0, 1)]


def test_of_running_sequences_the_one_with_the_least_kv_moves_first():
    tokens = [30, 10, 20, 10]
    source = rank(runs=[movable(i, tokens=t, status=Status.RUNNING) for i, t in enumerate(tokens)])
    assert moves(source, rank()) == [("s1", 0, 1), ("s3", 0, 1)]


def test_a_difference_of_one_sequence_causes_no_move():
    assert moves(rank(runs=running(3)), rank(runs=running(2, first=10))) == []


def test_waiting_sequences_count_too():
    queued = [sequence(20 + i) for i in range(4)]
    assert len(moves(rank(queued=queued, runs=running(2)), rank(runs=running(2, first=10)))) == 2


def test_the_fullest_rank_gives_to_the_emptiest():
    ranks = rank(runs=running(3)), rank(runs=running(7, first=10)), rank()
    assert moves(*ranks) == [("s10", 1, 2), ("s11", 1, 2), ("s12", 1, 2)]


@pytest.mark.parametrize("migration", [Migration.EVEN, Migration.ALWAYS])
def test_no_sequence_moves_to_a_rank_without_pages(migration):
    source = rank(ready=[movable(0, pages=5), movable(1, pages=3)], runs=running(2, first=2, pages=1))
    target = rank(free_pages=4)
    assert moves(source, target, migration=migration) == [("s1", 0, 1), ("s2", 0, 1)]


@pytest.mark.parametrize("migration", [Migration.EVEN, Migration.ALWAYS])
def test_no_sequence_moves_to_a_rank_without_request_slots(migration):
    assert moves(rank(runs=running(6)), rank(free_request_slots=1), migration=migration) == [("s0", 0, 1)]


def test_sequences_that_leave_a_rank_make_no_room_for_those_that_come():
    full = rank(runs=running(2, pages=4), free_pages=0)
    other = rank(runs=running(2, first=10, pages=4), free_pages=4)
    assert moves(full, other, migration=Migration.ALWAYS) == [("s0", 0, 1)]


def test_no_sequence_moves_to_a_rank_whose_decode_group_is_full():
    source = rank(ready=[movable(i) for i in range(20)])
    assert len(moves(source, rank(runs=running(6, first=30)))) == 2


def test_no_sequence_moves_to_a_rank_with_a_queue():
    """Its head may be waiting for these very pages, and would wait for ever."""
    target = rank(queued=[sequence(20)], runs=running(1, first=10), free_pages=10)
    assert moves(rank(runs=running(8)), target) == []


def test_if_the_fullest_rank_cannot_give_the_next_fullest_does():
    fixed = rank(unmovable_running=8, unmovable_ready=[sequence(40, status=Status.READY)])
    assert moves(fixed, rank(runs=running(4)), rank()) == [("s0", 1, 2), ("s1", 1, 2)]


def test_if_the_emptiest_rank_has_no_room_the_next_emptiest_takes():
    assert moves(rank(free_pages=0), rank(runs=running(5)), rank(runs=running(1, first=10))) == [
        ("s0", 1, 2),
        ("s1", 1, 2),
    ]


def test_migration_always_moves_all_that_fits_to_the_next_rank():
    first = rank(ready=[movable(0)], runs=running(1, first=1))
    assert moves(first, rank(runs=running(1, first=2)), rank(), migration=Migration.ALWAYS) == [
        ("s0", 0, 1),
        ("s1", 0, 1),
        ("s2", 1, 2),
    ]


@given(counts=st.lists(st.tuples(st.integers(0, 8), st.integers(0, 6)), min_size=2, max_size=4))
def test_moves_even_out_the_ranks_that_have_room(counts):
    ranks = [
        rank(runs=running(runs, first=100 * i), ready=[movable(100 * i + 50 + j) for j in range(ready)])
        for i, (runs, ready) in enumerate(counts)
    ]
    made = plan_moves(ranks, PLAN, Migration.EVEN)
    after = [runs + ready for runs, ready in counts]
    for move in made:
        after[move.source] -= 1
        after[move.target] += 1
    assert len({move.sequence_id for move in made}) == len(made), "no sequence moves twice"
    assert sum(after) == sum(runs + ready for runs, ready in counts)
    active = [min(total, PLAN.decode.b_moe) for total in after]
    assert max(active) - min(active) <= 1
