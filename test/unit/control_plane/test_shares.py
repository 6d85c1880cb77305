"""How many lines an instance gets at once, and which lines change their instance."""

from __future__ import annotations

import sys

from hypothesis import given
from hypothesis import strategies as st

from sgl_batch.control_plane.instances.shares import MOST_LINES, LineMove, Load, lot_lines, most_lines, moves


@given(st.integers(0, 10**6), st.integers(1, 64), st.integers(0, 4096))
def test_a_lot_has_no_more_lines_than_wait_or_than_there_is_room_for(waiting, instances, room):
    lines = lot_lines(waiting, instances, room)
    assert 0 <= lines <= min(waiting, room, MOST_LINES)
    assert lines or not waiting or not room


def test_the_share_of_an_instance_that_starts_waits_for_it():
    assert most_lines(2048, unanswered=600, rate=0.0, rates=[0.0, 0.0]) == 301
    assert most_lines(2048, unanswered=600, rate=0.0, rates=[0.0]) == 601
    assert most_lines(2048, unanswered=50_000, rate=0.0, rates=[0.0, 0.0]) == 2048


def test_a_fast_instance_has_more_lines_than_a_slow_one_and_every_one_has_some():
    assert [most_lines(2048, 600, rate, [1.0, 2.0]) for rate in (1.0, 2.0)] == [201, 401]
    assert most_lines(2048, unanswered=600, rate=0.0, rates=[2.0, 4.0, 0.0]) == 201
    assert most_lines(2048, unanswered=90, rate=1.0, rates=[1.0, 9.0]) == 64


def load(lines: int, *, rate: float, queued: int | None = None, is_counted: bool = True, movable: int = 0) -> Load:
    queued = lines if queued is None else queued
    return Load(lines=lines, queued=queued, is_counted=is_counted, movable=movable, rate=rate)


def test_after_a_move_both_instances_end_at_the_same_time():
    found = moves([load(100, rate=2.0, queued=0), load(500, rate=4.0)])
    assert found is not None
    assert (found.source, found.target) == (1, 0)
    assert abs((500 - found.count) / 4.0 - (100 + found.count) / 2.0) < 1


def test_lines_that_are_not_begun_move_first():
    assert moves([load(100, rate=2.0, queued=0), load(500, rate=2.0, queued=30, movable=500)]) == LineMove(
        source=1, target=0, count=30
    )


def test_begun_lines_move_where_the_rates_are_known_and_far_apart():
    fast = load(10, rate=2.0, queued=0)
    assert moves([fast, load(110, rate=1.0, queued=0, movable=110)]) == LineMove(
        source=1, target=0, count=70, begun=True
    )
    assert moves([fast, load(110, rate=1.0, queued=0, movable=20)]) == LineMove(
        source=1, target=0, count=20, begun=True
    )
    assert moves([fast, load(110, rate=1.0, queued=0)]) is None
    assert moves([fast, load(14, rate=1.0, queued=0, movable=14)]) is None
    assert moves([load(60, rate=1.0, queued=0), load(110, rate=1.0, queued=0, movable=110)]) is None
    assert moves([load(10, rate=0.0, queued=0), load(110, rate=1.0, queued=0, movable=110)]) is None


def test_an_instance_gets_no_lines_of_others_while_it_has_lines_to_begin():
    assert moves([load(100, rate=2.0, queued=20), load(500, rate=2.0)]) is None
    assert moves([load(100, rate=2.0, queued=0, is_counted=False), load(500, rate=2.0)]) is None


def test_an_instance_whose_rate_is_not_known_counts_as_fast_as_the_others():
    assert moves([load(400, rate=4.0), load(0, rate=0.0)]) == LineMove(source=0, target=1, count=200)
    assert moves([load(100, rate=0.0), load(0, rate=0.0)]) == LineMove(source=0, target=1, count=50)


def test_a_rate_too_small_to_count_with_is_one_that_is_not_known():
    tiny = sys.float_info.min
    assert moves([load(400, rate=4.0), load(0, rate=tiny)]) == LineMove(source=0, target=1, count=200)
    assert moves([load(4, rate=tiny)]) is None


def test_nothing_moves_where_it_would_gain_little():
    assert moves([load(100, rate=1.0), load(95, rate=1.0, queued=0)]) is None
    assert moves([load(100, rate=1.0)]) is None


LOADS = st.builds(
    Load,
    lines=st.integers(0, 5000),
    queued=st.integers(0, 5000),
    is_counted=st.booleans(),
    movable=st.integers(0, 5000),
    rate=st.floats(0, 1000),
)


@given(st.lists(LOADS, max_size=6))
def test_no_instance_gives_more_lines_than_may_move(loads):
    found = moves(loads)
    if found is not None:
        source = loads[found.source]
        assert found.source != found.target
        assert 0 < found.count <= (source.movable if found.begun else source.queued)
