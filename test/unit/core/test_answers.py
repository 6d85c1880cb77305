"""Counts between two readings, also by rank, and the share of time spent waiting."""

from __future__ import annotations

import pytest

from sgl_batch.core.answers import EngineStats


def test_counts_since_an_earlier_reading_are_kept_by_rank():
    earlier = EngineStats(ranks=[EngineStats(counters={"a": 1}), EngineStats(counters={"a": 2})])
    later = EngineStats(ranks=[EngineStats(counters={"a": 5}), EngineStats(counters={"a": 9})])
    assert [rank.counters for rank in later.since(earlier).ranks] == [{"a": 4}, {"a": 7}]
    assert [rank.counters for rank in later.since(EngineStats()).ranks] == [{"a": 5}, {"a": 9}]


@pytest.mark.parametrize(
    ("part_s", "share"),
    [
        ({"experts": 3.0, "idle": 1.0}, 0.25),
        ({"experts": 5.0, "exchange": 2.0, "stall": 2.0, "agreement": 1.0}, 0.3),
        ({"experts": 5.0, "exchange": 4.0, "stall": 0.0, "agreement": 1.0}, 0.5),
        ({"experts": 1.0, "boundary": 1.0}, 0.0),
        ({}, 0.0),
    ],
    ids=["a single rank", "waits measured", "waits not measured", "boundaries are work", "nothing yet"],
)
def test_the_waiting_share_is_idle_time_and_waits_for_other_ranks(part_s, share):
    assert EngineStats(part_s=part_s).waiting_share == pytest.approx(share)
