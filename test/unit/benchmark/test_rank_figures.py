"""Figures from ranks' counters: stalls apart from own work, the share of boundaries, load, the bound, the report."""

from __future__ import annotations

from pathlib import Path

import pytest
from comparison.workload import Workload
from several_ranks.figures import (
    Run,
    bound_s,
    boundary_share,
    imbalance,
    num_moved,
    routed_shares,
    stall_shares,
    stalls_are_counted,
)
from several_ranks.measuring import Case, Comparison
from several_ranks.report import bars, markdown, middle

from sgl_batch.core.answers import EngineStats


def rank(tokens=(), counters=None, **part_s):
    return EngineStats(part_s=part_s, tokens_per_expert=tokens, counters=counters or {})


def run(*ranks, seconds=10.0, alone=4.0, outputs="same"):
    return Run(
        seconds=seconds,
        longest_alone_s=alone,
        ranks=ranks or (rank(experts=10.0),),
        active=((0.4 * seconds, (8.0,) * max(1, len(ranks))), (seconds, (2.0,) * max(1, len(ranks)))),
        outputs=outputs,
        cores=((0,), (1,)),
        peak_rss_bytes=1 << 30,
        cpus_of_others=0.1,
    )


def test_a_counted_stall_is_reported_as_counted():
    ranks = [rank(experts=6.0, exchange=2.0, stall=2.0), rank(experts=9.0, exchange=1.0, stall=0.0)]
    assert stalls_are_counted(ranks)
    assert stall_shares(ranks) == [0.2, 0.0]


def test_without_a_count_the_stall_of_a_rank_is_its_exchange_time_above_the_quickest_ranks():
    ranks = [rank(experts=5.0, exchange=4.0, agreement=1.0), rank(experts=8.0, exchange=1.0, agreement=1.0)]
    assert not stalls_are_counted(ranks)
    assert stall_shares(ranks) == pytest.approx([0.3, 0.0])


def test_boundaries_are_a_share_of_the_time_outside_prefill_and_waits_for_requests():
    counters = {"prefill_us": 2_000_000}
    ranks = [
        rank(counters=counters, experts=16.5, idle=3.0, boundary=0.3, copies=0.2),
        rank(experts=16.9, idle=3.0, boundary=0.1, copies=0.0),
    ]
    assert boundary_share(ranks) == pytest.approx(0.5 / 15)


def test_load_is_reported_by_expert_and_by_rank():
    ranks = [rank(tokens=[30, 10]), rank(tokens=[10, 10])]
    assert imbalance(ranks) == 2.0
    assert routed_shares(ranks) == pytest.approx([2 / 3, 1 / 3])


def test_moves_are_counted_where_sequences_arrive():
    ranks = [rank(counters={"sequences_arrived": 2, "sequences_departed": 3}), rank(counters={"sequences_arrived": 3})]
    assert num_moved(ranks) == 5


@pytest.mark.parametrize(
    ("alone", "bound"),
    [((4.0, 6.0), 6.0), ((9.0, 7.0), 7.0)],
    ids=["all work shared out", "the longest sequence, where it is quickest"],
)
def test_the_bound_is_the_longer_of_shared_work_and_the_longest_sequence(alone, bound):
    several, one_rank = run(alone=alone[0]), run(seconds=12.0, alone=alone[1])
    assert bound_s(one_rank, [several, one_rank], 2) == bound


@pytest.fixture
def comparison():
    workload = Workload(prompts=[[1]], output_lens=[3], description="one sequence")
    cases = [
        Case(name="migration", model=Path("m"), engine={}, num_ranks=2),
        Case(name="one rank", model=Path("m"), engine={}, num_ranks=1, cores=[0]),
    ]
    parts = {"experts": 7.0, "exchange": 1.0, "stall": 2.0}
    return Comparison(
        name="tail",
        workload=workload,
        cases=cases,
        rounds=[
            {
                "migration": run(rank([1], **parts), rank([3], **parts), seconds=seconds),
                "one rank": run(rank([1, 3], experts=10.0), seconds=10.0),
            }
            for seconds in (5.0, 7.0, 6.0)
        ],
    )


def test_the_report_has_medians_with_their_range_and_ratios_to_the_bound(comparison):
    lines = markdown(comparison).splitlines()
    row = next(line for line in lines if line.startswith("| migration "))
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells[1:5] == ["6.0 (5.0-7.0)", "1.20 (1.00-1.40)", "20 %, 20 %", "20 %, 20 %"]
    assert cells[-2:] == ["1.50", "25 %, 75 %"]
    assert "Bound: 5.0 s. one rank: 10.0 s; longest sequence alone: 4.0 s (migration), 4.0 s (one rank)." in lines
    assert "migration, one rank: the same tokens in all rounds." in markdown(comparison)


def test_an_estimated_stall_is_marked_as_a_lower_bound(comparison):
    uncounted = {"experts": 7.0, "exchange": 3.0}
    for done in comparison.rounds:
        done["migration"] = run(rank([1], **uncounted), rank([3], experts=9.0, exchange=1.0))
    assert "at least 20 %, 0 %" in markdown(comparison)


def test_tokens_that_differ_between_cases_are_marked_in_capitals(comparison):
    comparison.rounds[1]["migration"] = run(rank([1], experts=1.0), rank([3], experts=1.0), outputs="other")
    assert "migration, one rank: 2 DIFFERENT sets of tokens in all rounds." in markdown(comparison)


def test_an_incomplete_round_is_left_out_and_without_rounds_the_report_is_empty(comparison):
    del comparison.rounds[2]["one rank"]
    assert "2 rounds." in markdown(comparison)
    comparison.rounds.clear()
    assert markdown(comparison) == ""


def test_the_round_of_median_time_is_one_that_was_run():
    assert [middle([run(seconds=s) for s in seconds]).seconds for seconds in ((3, 1, 2), (4, 1))] == [2, 1]


def test_bars_show_the_active_sequences_over_time():
    line = bars([(5.0, 8.0), (10.0, 0.0), (20.0, 1.0)], seconds=20.0, most=8.0)
    assert line == "█" * 15 + " " * 15 + "▂" * 30
