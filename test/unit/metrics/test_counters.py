"""Time is counted once, to the innermost part; calls and rows are added up."""

from __future__ import annotations

import json
from contextlib import suppress

import pytest
import torch

from sgl_batch.metrics import counters as module
from sgl_batch.metrics.counters import PARTS, Counters, PartClock


@pytest.fixture
def wall(monkeypatch):
    """A clock that the test sets: wall[0] is the time in seconds."""
    now = [100.0]
    monkeypatch.setattr(module.time, "perf_counter", lambda: now[0])
    return now


def test_time_in_an_inner_part_is_not_counted_in_the_outer_one(wall):
    clock = PartClock()
    wall[0] += 1
    with clock.part("attention"):
        wall[0] += 2
        with clock.part("copies"):
            wall[0] += 4
        wall[0] += 8
    wall[0] += 16
    assert clock.read() == {**dict.fromkeys(PARTS, 0.0), "other": 17.0, "attention": 10.0, "copies": 4.0}


def test_the_parts_sum_to_the_wall_time_while_one_runs(wall):
    clock = PartClock()
    for name in PARTS:
        with clock.part(name):
            wall[0] += 3
            assert sum(clock.read().values()) == wall[0] - 100
    assert clock.read() == dict.fromkeys(PARTS, 3.0)


def test_a_part_ends_when_its_block_raises(wall):
    clock = PartClock()
    with suppress(KeyError), clock.part("experts"):
        wall[0] += 5
        raise KeyError
    wall[0] += 1
    assert clock.read()["experts"] == 5
    assert clock.read()["other"] == 1


def test_a_reading_does_not_change_later(wall):
    clock = PartClock()
    reading = clock.read()
    wall[0] += 5
    clock.read()
    assert reading["other"] == 0


def test_amounts_are_added_by_name():
    counters = Counters()
    counters.add("boundaries")
    counters.add("rows", 5)
    counters.add("rows", 7)
    assert counters.as_dict()["counters"] == {"boundaries": 1, "rows": 12}


def test_an_expert_call_counts_its_rows_and_its_experts_with_rows():
    counters, rows_per_expert = Counters(), torch.tensor([4, 0, 2])
    counters.add_expert_call(rows_per_expert)
    counters.add_expert_call(torch.tensor([0, 0, 6]))
    read = counters.as_dict()
    assert read["counters"] == {"expert_calls": 2, "expert_rows": 12, "expert_gemms": 3}
    assert read["tokens_per_expert"] == [4, 0, 8]
    assert rows_per_expert.tolist() == [4, 0, 2], "the caller's rows are left alone"


def test_new_counters_can_be_read_and_sent():
    read = json.loads(json.dumps(Counters().as_dict()))
    assert read["counters"] == {}
    assert read["tokens_per_expert"] == []
    assert set(read["part_s"]) == set(PARTS)


def test_time_without_work_is_idle():
    assert "idle" in PARTS
    assert "waiting" not in PARTS


def test_an_uncounted_block_changes_only_its_time_and_the_named_counts(wall):
    counters = Counters()
    counters.add("decode_groups", 2)
    counters.add_expert_call(torch.tensor([1, 2]))
    before = counters.as_dict()
    with counters.uncounted(["graphs_captured"]):
        counters.add("decode_groups", 5)
        counters.add("graphs_captured")
        counters.add_expert_call(torch.tensor([7, 7]))
        with counters.clock.part("attention"):
            wall[0] += 3
    after = counters.as_dict()
    assert after["counters"] == {**before["counters"], "graphs_captured": 1}
    assert after["tokens_per_expert"] == [1, 2]
    assert after["part_s"] == {**dict.fromkeys(PARTS, 0.0), "other": 3.0}
