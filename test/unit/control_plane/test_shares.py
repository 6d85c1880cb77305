"""How many lines an instance gets at once, and which lines change their instance."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sgl_batch.control_plane.instances.shares import MOST_LINES, Load, lot_lines, most_lines, moves


@given(st.integers(0, 10**6), st.integers(1, 64), st.integers(0, 4096))
def test_a_lot_has_no_more_lines_than_wait_or_than_there_is_room_for(waiting, instances, room):
    lines = lot_lines(waiting, instances, room)
    assert 0 <= lines <= min(waiting, room, MOST_LINES)
    assert lines or not waiting or not room


def test_the_share_of_instances_that_start_waits_for_them():
    assert most_lines(2048, unanswered=600, ready=1, coming=1) == 300
    assert most_lines(2048, unanswered=600, ready=1, coming=0) == 2048
    assert most_lines(2048, unanswered=50_000, ready=1, coming=1) == 2048
    assert most_lines(2048, unanswered=90, ready=1, coming=2) == 64


def load(lines: int, *, rate: float, queued: int | None = None, is_counted: bool = True) -> Load:
    return Load(lines=lines, queued=lines if queued is None else queued, is_counted=is_counted, rate=rate)


def test_after_a_move_both_instances_end_at_the_same_time():
    source, target, count = moves([load(100, rate=2.0, queued=0), load(500, rate=4.0)])
    assert (source, target) == (1, 0)
    assert abs((500 - count) / 4.0 - (100 + count) / 2.0) < 1


def test_only_lines_that_are_not_begun_move():
    assert moves([load(100, rate=2.0, queued=0), load(500, rate=2.0, queued=30)]) == (1, 0, 30)
    assert moves([load(100, rate=2.0, queued=0), load(500, rate=2.0, queued=0)]) is None


def test_an_instance_gets_no_lines_of_others_while_it_has_lines_to_begin():
    assert moves([load(100, rate=2.0, queued=20), load(500, rate=2.0)]) is None
    assert moves([load(100, rate=2.0, queued=0, is_counted=False), load(500, rate=2.0)]) is None


def test_an_instance_whose_rate_is_not_known_counts_as_fast_as_the_others():
    assert moves([load(400, rate=4.0), load(0, rate=0.0)]) == (0, 1, 200)
    assert moves([load(100, rate=0.0), load(0, rate=0.0)]) == (0, 1, 50)


def test_nothing_moves_where_it_would_gain_little():
    assert moves([load(100, rate=1.0), load(95, rate=1.0, queued=0)]) is None
    assert moves([load(100, rate=1.0)]) is None


LOADS = st.builds(
    Load, lines=st.integers(0, 5000), queued=st.integers(0, 5000), is_counted=st.booleans(), rate=st.floats(0, 1000)
)


@given(st.lists(LOADS, max_size=6))
def test_no_instance_gives_more_lines_than_it_has_not_begun(loads):
    found = moves(loads)
    if found is not None:
        source, target, count = found
        assert source != target
        assert 0 < count <= loads[source].queued
