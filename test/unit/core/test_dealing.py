"""Requests are dealt to the ranks by predicted work."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_batch.core.dealing import WorkDealer


def test_equal_requests_are_dealt_by_turns():
    dealer = WorkDealer(3)
    assert [dealer.deal(100) for _ in range(7)] == [0, 1, 2, 0, 1, 2, 0]


def test_after_a_long_request_the_other_ranks_get_the_short_ones():
    dealer = WorkDealer(2)
    assert [dealer.deal(tokens) for tokens in (1000, 10, 10, 10)] == [0, 1, 1, 1]


def test_requests_that_name_their_rank_count_there():
    dealer = WorkDealer(2)
    dealer.count(0, 50)
    assert [dealer.deal(20) for _ in range(4)] == [1, 1, 1, 0]


@settings(deadline=None)
@given(tokens=st.lists(st.integers(0, 500), min_size=1), num_ranks=st.integers(1, 8))
def test_no_rank_gets_more_than_another_by_more_than_the_largest_request(tokens, num_ranks):
    dealer, work = WorkDealer(num_ranks), [0] * num_ranks
    for one in tokens:
        work[dealer.deal(one)] += one
    assert max(work) - min(work) <= max(tokens)
