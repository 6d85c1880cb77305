"""Drafts follow earlier occurrences, sequences whose drafts fail draft less, and a pass has as many as pay."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgl_batch.core.speculation import (
    LONGEST_MATCH,
    MOST_ROWS,
    Draft,
    PassCost,
    SequenceDrafts,
    SuffixIndex,
    drafts_wanted,
    most_drafts,
    num_drafts,
    num_right,
)

TOKENS = st.lists(st.integers(0, 3), max_size=40)


def match_by_definition(tokens: list[int]) -> tuple[int, int]:
    for length in range(LONGEST_MATCH, 0, -1):
        for start in range(len(tokens) - length - 1, -1, -1):
            if length < len(tokens) and tokens[start : start + length] == tokens[-length:]:
                return length, start + length
    return 0, 0


def cost_of(row_share: float, passes: int = 200) -> PassCost:
    """Return a cost that was measured for passes of 1 to 9 rows, where a row costs this share of a pass of one row."""
    cost, rng = PassCost(), random.Random(1)
    for _ in range(passes):
        rows = rng.randrange(1, 10)
        cost.note(rows, 0.1 * (1 + row_share * (rows - 1)))
    return cost


@given(TOKENS)
def test_a_match_is_the_last_occurrence_of_the_longest_end(tokens):
    assert SuffixIndex(tokens).match() == match_by_definition(tokens)


@given(TOKENS, st.integers(0, 40))
def test_an_index_does_not_depend_on_how_tokens_came(tokens, cut):
    grown = SuffixIndex(tokens[:cut])
    for token in tokens[cut:]:
        grown.extend([token])
    assert grown.match() == SuffixIndex(tokens).match()
    assert grown.draft(9) == SuffixIndex(tokens).draft(9)


@given(TOKENS, st.integers(0, 20))
def test_a_draft_begins_with_what_followed_and_repeats_what_repeats(tokens, most):
    length, start = match_by_definition(tokens)
    drafted = SuffixIndex(tokens).draft(most)
    assert len(drafted) == (most if length else 0)
    whole = [*tokens, *drafted]
    assert all(whole[len(tokens) + number] == whole[start + number] for number in range(len(drafted)))


def test_a_longer_match_goes_before_a_later_one():
    assert SuffixIndex([1, 2, 3, 9, 3, 7, 2, 3]).draft(2) == (9, 3)


@given(TOKENS, TOKENS)
def test_right_drafts_are_the_equal_ones_before_the_first_that_differs(drafted, tokens):
    number = num_right(drafted, tokens)
    assert drafted[:number] == tokens[:number]
    assert number == min(len(drafted), len(tokens)) or drafted[number] != tokens[number]


def test_a_sequence_whose_drafts_fail_drafts_less_and_one_whose_drafts_are_right_more():
    cost = cost_of(0.2)
    wrong, right = SequenceDrafts(lambda tokens, most: [7] * most), SequenceDrafts(lambda tokens, most: [5] * most)
    first = num_drafts([wrong.draft(8), right.draft(8)], cost)
    for _ in range(20):
        for sequence in (wrong, right):
            sequence.extend([5])
            sequence.draft(8)
    number_wrong, number_right = num_drafts([wrong.draft(8), right.draft(8)], cost)
    assert number_wrong == 0 < first[0]
    assert number_right == 8 >= first[1]


def test_what_a_step_drafted_counts_also_where_the_pass_did_not_verify_it():
    sequence = SequenceDrafts()
    sequence.extend([1, 2, 3, 4, 1, 2, 3, 4])
    before = sequence.draft(4)
    sequence.extend([1])
    assert before.tokens == (1, 2, 3, 4)
    assert sequence.draft(4).rate > before.rate
    sequence.extend([9, 1, 2, 3])
    assert sequence.num_tokens == 13


def test_a_user_s_drafts_end_before_a_token_that_is_none():
    sequence = SequenceDrafts(lambda tokens, most: [3, 99, 4, 5], vocab_size=99)
    assert sequence.draft(8).tokens == (3,)
    assert SequenceDrafts(lambda tokens, most: [3, 4, -1], vocab_size=99).draft(2).tokens == (3, 4)


def test_drafts_of_short_matches_are_counted_by_themselves():
    sequence = SequenceDrafts()
    sequence.extend([1, 2])
    for number in range(10, 20):
        assert len(sequence.draft(3).tokens) == 3 * (number > 10)
        sequence.extend([2 * number, 1])
    short = sequence.draft(3).rate
    assert short < SequenceDrafts(lambda tokens, most: [1]).draft(1).rate


def test_a_sequence_without_an_earlier_occurrence_drafts_nothing():
    sequence = SequenceDrafts()
    sequence.extend([1, 2, 3])
    assert sequence.draft(8) == Draft(tokens=(), rate=0.0)


def test_a_pass_has_more_drafts_where_rows_cost_less_and_none_where_a_row_costs_a_pass():
    drafts = [Draft(tokens=tuple(range(15)), rate=0.8)]
    numbers = [num_drafts(drafts, cost_of(share))[0] for share in (0.02, 0.1, 0.3, 1.0)]
    assert numbers == sorted(numbers, reverse=True)
    assert numbers[0] > numbers[2] > numbers[3] == 0


@given(
    st.lists(st.tuples(st.integers(0, 15), st.floats(0, 1)), min_size=1, max_size=4),
    st.sampled_from((0.05, 0.2, 0.5, 1.0)),
)
def test_no_other_number_of_one_sequence_s_drafts_gives_clearly_more_tokens_per_second(sequences, share):
    drafts = [Draft(tokens=(0,) * most, rate=rate) for most, rate in sequences]
    cost = cost_of(share)

    def tokens_per_second(numbers):
        rows = len(numbers) + sum(numbers)
        tokens = sum(
            sum(draft.rate**one for one in range(number + 1)) for draft, number in zip(drafts, numbers, strict=True)
        )
        return tokens / cost.of(rows)

    taken = num_drafts(drafts, cost)
    assert len(drafts) + sum(taken) <= MOST_ROWS
    for index, draft in enumerate(drafts):
        for number in range(len(draft.tokens) + 1):
            other = [*taken[:index], number, *taken[index + 1 :]]
            if len(drafts) + sum(other) <= MOST_ROWS:
                assert tokens_per_second(other) <= tokens_per_second(taken) * (1 + 1e-9 if sum(taken) else 1.06)


def test_without_a_cost_all_drafts_are_taken_that_the_pass_has_rows_for():
    drafts = [Draft(tokens=(1, 2, 3), rate=0.0), Draft(tokens=(), rate=0.0), Draft(tokens=(1,) * 9, rate=0.5)]
    assert num_drafts(drafts, None) == [3, 0, 9]
    assert sum(num_drafts(drafts, None, most_rows=8)) == 5


def test_a_measured_cost_is_a_line_through_the_passes():
    cost = cost_of(0.3)
    assert cost.of(1) == pytest.approx(0.1, rel=0.05)
    assert cost.of(9) == pytest.approx(0.34, rel=0.05)


def test_a_pass_that_was_held_up_changes_the_cost_little():
    cost = cost_of(0.3)
    cost.note(5, 100.0)
    assert cost.of(5) < 1.2 * cost_of(0.3).of(5)


def test_rows_whose_cost_was_not_measured_for_long_are_tried_again():
    dear = cost_of(1.0)
    drafts = [Draft(tokens=(1,) * 8, rate=0.9)]
    assert num_drafts(drafts, dear) == [0]
    for _ in range(500):
        dear.note(1, 0.1)
    assert num_drafts(drafts, dear)[0] > 0


@given(
    position=st.integers(0, 200),
    page_size=st.sampled_from((1, 16, 64)),
    tokens_left=st.integers(1, 64),
)
def test_drafts_stay_in_the_page_and_in_the_length(position, page_size, tokens_left):
    most = most_drafts(position=position, page_size=page_size, tokens_left=tokens_left)
    assert most >= 0
    assert (position + most) // page_size == position // page_size
    assert 1 + most <= tokens_left


def test_an_option_says_how_many_drafts_a_sequence_has_at_most():
    assert [drafts_wanted(value) for value in ("off", "auto", "3")] == [0, None, 3]
