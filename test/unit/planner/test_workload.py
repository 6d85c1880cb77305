"""Workloads as users write them, and what is said of those that are wrong."""

from __future__ import annotations

import itertools

import pytest

from sgl_batch.errors import ConfigError
from sgl_batch.planner.workload import Request, Workload, followed, parse_lengths, parse_workload, within_context


def test_a_workload_names_prompt_output_and_count():
    assert parse_workload("128:32x2, 8:1x1").requests == [Request(128, 32)] * 2 + [Request(8, 1)]
    assert parse_workload("128:32x256").longest == 160


def test_a_workload_without_a_count_is_256_requests():
    assert parse_workload("128:32").requests == [Request(128, 32)] * 256


@pytest.mark.parametrize("text", ["", "128", "0:32x4", "128:32x0", "a:bxc", "128:32x256:"])
def test_a_workload_of_another_form_is_refused_with_an_example(text):
    with pytest.raises(ConfigError, match="as in 128:32x256"):
        parse_workload(text)


def test_a_large_batch_of_few_kinds_is_followed_by_a_sample_of_its_mix():
    found = parse_workload("128:32x60000000,4:4x20000000")
    assert (found.count, found.tokens[0]) == (80_000_000, 60_000_000 * 128 + 20_000_000 * 4)
    assert list(found.requests) == [Request(128, 32)] * 3 + [Request(4, 4)]
    assert len(parse_workload("4:4x1000000").requests) == 1_000_000


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("4:4x100000001", "of 100,000,001 requests; give at most 100,000,000"),
        ("4:4x1000000,5:5x3", "give at most 1,000,000, or give counts that are multiples of a larger number"),
    ],
)
def test_a_batch_too_large_to_follow_is_refused(text, words):
    with pytest.raises(ConfigError, match=words):
        parse_workload(text)


@pytest.mark.parametrize("number", ["1000000001", "9" * 20, "9" * 5000])
def test_a_sequence_of_more_tokens_than_any_has_is_refused(number):
    with pytest.raises(ConfigError, match="at most 1,000,000,000"):
        parse_workload(f"8:8,1:{number}")
    with pytest.raises(ConfigError, match=r"line 2 .*at most 1,000,000,000"):
        parse_lengths(["8 8", f"{number} 1"], "lengths.txt")


def test_a_file_of_too_many_lengths_is_refused():
    with pytest.raises(ConfigError, match="more than 1,000,000 requests; give a sample"):
        parse_lengths(itertools.repeat("1 1"), "endless")


def test_lengths_may_have_comments_commas_and_empty_lines():
    found = parse_lengths(["# prompt output", "128 32", "", "64, 8  # short"], "lengths.txt")
    assert found.requests == [Request(128, 32), Request(64, 8)]


@pytest.mark.parametrize("line", ["128", "128 x", "128 -1", "0 4", "1 2 3", "12.5 3"])
def test_a_hole_in_a_file_of_lengths_is_named_by_its_line(line):
    with pytest.raises(ConfigError, match=r"line 2 of lengths\.txt is"):
        parse_lengths(["128 32", line], "lengths.txt")


def test_a_file_without_lengths_is_refused():
    with pytest.raises(ConfigError, match="has no lengths"):
        parse_lengths(["# nothing"], "lengths.txt")


def test_the_requests_that_are_followed_keep_the_order_and_the_count():
    whole = parse_workload("1:1x10,2:2x10")
    found = followed(whole, 4)
    assert [one.prompt for one in found.requests] == [1, 1, 2, 2]
    assert found.count == 20
    assert followed(whole, 100) is whole


def test_a_sample_is_followed_as_often_as_it_stands_for():
    found = followed(Workload(requests=[Request(1, 1), Request(2, 2)], count=5), 100)
    assert [one.prompt for one in found.requests] == [1, 1, 1, 2, 2]


def test_no_sequence_is_longer_than_the_context():
    found = within_context(parse_workload("8:8x1,2:2x1,30:4x1"), 10)
    assert found.requests == [Request(8, 2), Request(2, 2), Request(9, 1)]
