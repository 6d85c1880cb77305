"""Workloads for ranks: the synthetic tail has its documented shape, a trace keeps its own, and both keep the budget."""

from __future__ import annotations

import pytest
from comparison.trace_lengths import trace_lengths
from several_ranks.workloads import Budget, quantile_index, scaled, tail_lengths

from sgl_batch.errors import ConfigError


def budget(**changes):
    asked = {"num_prompts": 104, "input_tokens": 3328, "output_tokens": 2080, "vocabulary": 3072, "seed": 1}
    return Budget(**{**asked, **changes})


@pytest.mark.parametrize(("count", "total"), [(100, 2000), (104, 2080), (250, 40_000), (1000, 9000)])
def test_the_made_up_tail_has_its_percentiles_and_its_budget(count, total):
    lengths = tail_lengths(count, total)
    p95, p99 = lengths[quantile_index(0.95, count)], lengths[quantile_index(0.99, count)]
    assert lengths == sorted(lengths)
    assert p99 == pytest.approx(3.8 * p95, abs=0.5)
    assert lengths[-1] == 9 * p95
    assert p99 < lengths[-1]
    assert sum(lengths) == pytest.approx(total, rel=0.1)


def test_too_few_sequences_for_a_tail_are_refused_with_the_number_that_does():
    with pytest.raises(ConfigError, match=r"--num-prompts is 99.* at least 100"):
        budget(num_prompts=99).tail()


def test_a_seed_gives_the_same_workload_and_another_the_same_lengths_in_another_order():
    first, again, other = budget().tail(), budget().tail(), budget(seed=2).tail()
    assert (first.prompts, first.output_lens) == (again.prompts, again.output_lens)
    assert first.output_lens != other.output_lens
    assert sorted(first.output_lens) == sorted(other.output_lens)
    assert {len(prompt) for prompt in first.prompts} == {32}


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_in_an_uneven_workload_ranks_that_take_turns_get_sequences_by_length(num_ranks):
    lengths = budget().uneven(num_ranks).output_lens
    assert sorted(lengths) == sorted(budget().tail().output_lens)
    by_rank = [lengths[rank::num_ranks] for rank in range(num_ranks)]
    assert [length for of_rank in by_rank for length in of_rank] == sorted(lengths, reverse=True)


def test_scaled_lengths_keep_their_shape_and_are_at_least_one():
    assert scaled([100, 200, 700], 10) == [1, 2, 7]
    assert scaled([1, 1, 1000], 30) == [1, 1, 30]


def test_sequences_that_are_all_alike_share_the_budget_evenly():
    workload = budget().even()
    assert {len(prompt) for prompt in workload.prompts} == {32}
    assert set(workload.output_lens) == {20}


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "trace.csv"
    rows = [f"2023-11-16 18:15:46,{100 + 10 * i},{10 + i}" for i in range(200)]
    path.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]) + "\n")
    return path


def test_a_trace_is_drawn_from_and_scaled_to_the_budget(trace):
    workload = budget().trace(trace)
    assert len(workload.prompts) == 104
    assert workload.prompt_tokens == pytest.approx(3328, rel=0.05)
    assert workload.output_tokens == pytest.approx(2080, rel=0.05)
    longer = max(range(104), key=lambda i: len(workload.prompts[i]))
    assert workload.output_lens[longer] == max(workload.output_lens), "a request's two lengths stay together"


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("TIMESTAMP,ContextTokens\nx,1\n", "no column GeneratedTokens"),
        ("ContextTokens,GeneratedTokens\n5,6\n7,many\n", "line 3: .*many"),
        ("", "no column ContextTokens and no column GeneratedTokens"),
    ],
)
def test_a_file_that_is_no_trace_is_refused_with_the_fault(tmp_path, text, fault):
    path = tmp_path / "trace.csv"
    path.write_text(text)
    with pytest.raises(ConfigError, match=fault):
        trace_lengths(path)


def test_a_trace_that_is_too_short_or_missing_is_named(trace, tmp_path):
    with pytest.raises(ConfigError, match="has 200 requests and --num-prompts is 300"):
        budget(num_prompts=300).trace(trace)
    with pytest.raises(ConfigError, match="is not a file"):
        trace_lengths(tmp_path / "nowhere.csv")


@pytest.mark.parametrize(
    ("change", "flag"),
    [
        ({"num_prompts": 0}, "--num-prompts"),
        ({"input_tokens": 9}, "--input-tokens"),
        ({"output_tokens": 9}, "--output"),
    ],
)
def test_a_budget_that_cannot_be_names_the_flag_at_fault(change, flag):
    with pytest.raises(ConfigError, match=flag):
        budget(**change)
