"""Layers laid out in time: when work starts, on which stream, and what the critical path is."""

from __future__ import annotations

from itertools import pairwise

import pytest

from sgl_batch.planner.layer_bars import pass_picture
from sgl_batch.planner.layer_dag import ATTENTION, EXPERTS, FETCH, RESTORE, LayerWork, SubBatch, Work, layer_time

SLOW_FETCH = LayerWork(
    sub_batches=[SubBatch(attention=Work(seconds=1), restore=Work(seconds=0.5))] * 2,
    experts=Work(seconds=2),
    fetch=Work(seconds=7),
)


def test_work_of_one_stream_never_overlaps():
    shown = pass_picture("", SLOW_FETCH)
    for stream in {bar.stream for bar in shown.bars}:
        bars = sorted((bar for bar in shown.bars if bar.stream == stream), key=lambda bar: bar.start_s)
        assert all(one.start_s + one.seconds <= other.start_s for one, other in pairwise(bars))


def test_the_critical_path_is_what_everything_waits_for():
    shown = pass_picture("", SLOW_FETCH)
    assert {bar.kind for bar in shown.bars if bar.critical} == {FETCH, EXPERTS}
    assert sum(bar.seconds for bar in shown.bars if bar.critical) == pytest.approx(shown.end_s)
    assert {bar.kind for bar in shown.bars} == {ATTENTION, EXPERTS, FETCH, RESTORE}
    assert shown.layer_s == layer_time(SLOW_FETCH).seconds


def test_every_layer_is_shown_and_work_of_no_time_is_not():
    shown = pass_picture("", LayerWork(sub_batches=[SubBatch(attention=Work(seconds=1))], experts=Work(seconds=2)), 2)
    assert [(bar.layer, bar.kind, bar.start_s) for bar in shown.bars] == [
        (0, ATTENTION, 0), (0, EXPERTS, 1), (1, ATTENTION, 3), (1, EXPERTS, 4)
    ]  # fmt: skip
    assert all(bar.critical for bar in shown.bars)
