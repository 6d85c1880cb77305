"""The statistics of several ranks are those of one engine: nothing is lost, and nothing counted twice."""

from __future__ import annotations

from typing import Any

from sgl_batch.engine.rank_stats import engine_stats, merged_stats


def stats_of(
    rank: int, *, part_s: dict[str, float] | None = None, store: dict[str, int] | None = None, **counters: int
) -> dict[str, Any]:
    return {
        "rank": rank,
        "counters": counters,
        "part_s": part_s or {"experts": 1.0, "idle": 0.0},
        "tokens_per_expert": [10 * rank, 10 * rank + 1],
        "sequences": {"RUNNING": 1 + rank},
        "plan": {"page_size": 64},
        "free_pages": 5,
        "total_pages": 8,
        "memory": {"peak_bytes": 100 - rank, "budget_bytes": 200},
        "cpu": {"cpus": 2, "threads": 1 + rank},
        "forward": "coroutine",
        "overflow_directory": "/scratch",
        "store": store or {},
    }


def test_a_lone_rank_s_statistics_stay_as_they_are():
    alone = stats_of(0, decode_steps=3)
    assert merged_stats([alone]) == alone
    assert merged_stats([alone]) is not alone


def test_counters_are_added_up():
    merged = merged_stats([stats_of(0, output_tokens=3, prefill_groups=1), stats_of(1, output_tokens=4)])
    assert merged["counters"] == {"output_tokens": 7, "prefill_groups": 1}


def test_cpus_and_threads_are_those_of_all_ranks_and_there_are_none_on_gpus():
    assert merged_stats([stats_of(0), stats_of(1)])["cpu"] == {"cpus": 4, "threads": 3}
    assert merged_stats([{**stats_of(rank), "cpu": {}} for rank in range(2)])["cpu"] == {}


def test_sequences_of_all_ranks_are_counted_by_state():
    merged = merged_stats([stats_of(0), stats_of(1)])
    assert engine_stats(merged).sequences == {"RUNNING": 3}
    assert engine_stats(merged).overflow_directory == "/scratch"


def test_steps_that_all_take_together_count_once():
    ranks = [stats_of(0, boundaries=2, decode_steps=9), stats_of(1, boundaries=2, decode_steps=9)]
    assert merged_stats(ranks)["counters"] == {"boundaries": 2, "decode_steps": 9}


def test_a_rank_that_was_asked_a_step_later_or_counts_nothing_yet_changes_nothing():
    ranks = [stats_of(0), stats_of(1, decode_steps=8), stats_of(2, decode_steps=9)]
    assert merged_stats(ranks)["counters"] == {"decode_steps": 9}


def test_seconds_are_means_so_that_parts_still_add_up_to_the_time_that_passed():
    ranks = [
        stats_of(0, part_s={"experts": 3.0, "idle": 1.0}),
        stats_of(1, part_s={"experts": 1.0, "idle": 3.0}),
    ]
    assert merged_stats(ranks)["part_s"] == {"experts": 2.0, "idle": 2.0}


def test_experts_come_in_the_order_of_ranks_which_share_them_out():
    merged = merged_stats([stats_of(2), stats_of(0), stats_of(1)])
    assert merged["tokens_per_expert"] == [0, 1, 10, 11, 20, 21]


def test_pages_are_summed_over_ranks():
    merged = merged_stats([stats_of(0), stats_of(1)])
    assert (merged["free_pages"], merged["total_pages"]) == (10, 16)


def test_memory_is_that_of_the_rank_with_the_most():
    stats = engine_stats(merged_stats([stats_of(1), stats_of(0)]))
    assert (stats.peak_memory_bytes, stats.memory_budget_bytes) == (100, 200)
    assert [rank.peak_memory_bytes for rank in stats.ranks] == [100, 99]


def test_the_store_that_ranks_share_is_as_the_last_of_them_saw_it():
    early, late = ({"total_pages": 9, "free_pages": free} for free in (7, 9))
    assert merged_stats([stats_of(0, store=early), stats_of(1, store=late)])["store"] == late


def test_each_rank_s_own_statistics_are_kept_by_rank_and_unchanged():
    ranks = [stats_of(1, decode_steps=9), stats_of(0, decode_steps=9)]
    merged = merged_stats(ranks)
    assert merged["ranks"] == [stats_of(0, decode_steps=9), stats_of(1, decode_steps=9)]
    assert merged["plan"] == {"page_size": 64}
    assert merged["rank"] == 0


def test_jobs_get_the_sums_and_each_rank_s_own():
    ranks = [stats_of(0, output_tokens=3), stats_of(1, output_tokens=4)]
    stats = engine_stats(merged_stats(ranks))
    assert stats.counters == {"output_tokens": 7}
    assert stats.forward == "coroutine"
    assert [rank.counters for rank in stats.ranks] == [{"output_tokens": 3}, {"output_tokens": 4}]
    assert [rank.tokens_per_expert for rank in stats.ranks] == [[0, 1], [10, 11]]
    assert engine_stats(merged_stats(ranks[:1])).ranks == ()
