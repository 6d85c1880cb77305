"""The mean of the outputs that were longer than a length, of those that have ended so far."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_batch.core.ended_lengths import EndedLengths


def test_where_no_output_was_longer_there_is_no_mean():
    assert EndedLengths().mean_above(0) is None
    assert EndedLengths([5, 7]).mean_above(7) is None


@settings(deadline=None)
@given(lengths=st.lists(st.integers(0, 300)), asked=st.lists(st.integers(0, 400), min_size=1))
def test_the_mean_is_that_of_all_longer_lengths(lengths, asked):
    ended = EndedLengths(lengths)
    assert len(ended) == len(lengths)
    for length in asked:
        longer = [one for one in lengths if one > length]
        assert ended.mean_above(length) == (pytest.approx(sum(longer) / len(longer)) if longer else None)
