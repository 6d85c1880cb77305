"""The arithmetic of a comparison: medians, paired ratios, agreement, remaining time."""

from __future__ import annotations

import pytest
from comparison.figures import agreement, common_prefix, length_fault, paired_ratios, remaining_s, spread


def test_a_spread_is_median_smallest_and_largest():
    found = spread([3.0, 1.0, 2.5])
    assert (found.median, found.low, found.high, found.count) == (2.5, 1.0, 3.0, 3)
    assert found.text(1) == "2.5 (1.0-3.0)"


def test_a_single_value_has_no_range_and_no_value_no_spread():
    assert spread([4.25]).text(2) == "4.25"
    assert spread([]) is None


def test_ratios_pair_only_rounds_that_both_engines_finished():
    ours, theirs = {1: 10.0, 2: 30.0, 3: 8.0}, {1: 5.0, 2: 10.0, 4: 1.0}
    found = paired_ratios(ours, theirs)
    assert (found.median, found.low, found.high, found.count) == (2.5, 2.0, 3.0, 2)


def test_engines_without_a_common_round_have_no_ratio():
    assert paired_ratios({1: 2.0}, {2: 2.0}) is None


@pytest.mark.parametrize(
    ("first", "second", "shared"), [([1, 2, 3], [1, 2, 3], 3), ([1, 2, 3], [1, 9, 3], 1), ([], [1], 0), ([5], [6], 0)]
)
def test_a_common_prefix_ends_at_the_first_difference(first, second, shared):
    assert common_prefix(first, second) == shared


def test_agreement_counts_whole_outputs_and_tokens_before_the_first_difference():
    found = agreement([[1, 2, 3, 4], [5, 6, 7, 8]], [[1, 2, 3, 4], [5, 0, 7, 8]])
    assert (found.identical, found.prompts, found.common_tokens, found.tokens) == (1, 2, 5, 8)
    assert found.text() == "1/2 (62 %)"


def test_a_wrong_number_of_output_tokens_names_the_prompt():
    assert length_fault([[1, 2], [3]], [2, 2]) == "prompt 2 gave 1 output tokens, not 2"
    assert length_fault([[1, 2]], [2, 2]) == "it answered 1 of 2 prompts"
    assert length_fault([[1, 2], [3, 4]], [2, 2]) is None


def test_remaining_time_takes_an_engine_that_has_not_run_for_an_average_one():
    took = {"sgl_batch": [10.0, 20.0], "stock": [45.0], "hf": []}
    assert remaining_s(["sgl_batch", "stock"], took) == 60.0
    assert remaining_s(["hf"], took) == 30.0
    assert remaining_s(["hf"], {"hf": []}) is None
