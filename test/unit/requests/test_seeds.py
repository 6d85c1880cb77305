"""The first choice has the request's seed. Those of the others are spread, and the same in every version."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_batch.requests.seeds import choice_seed

# No deadline: a busy machine is no fault of the code.
QUICK = settings(max_examples=100, deadline=None)


@QUICK
@given(st.integers(0, 2**63 - 1))
def test_the_first_choice_has_the_requests_own_seed(seed):
    assert choice_seed(seed, 0) == seed


@QUICK
@given(st.integers(-(2**70), 2**70), st.integers(0, 1000))
def test_a_seed_fits_a_signed_64_bit_integer_and_is_not_negative(seed, choice):
    assert 0 <= choice_seed(seed, choice) < 2**63
    assert choice_seed(seed, choice) == choice_seed(seed, choice)


@QUICK
@given(st.integers(0, 100))
def test_a_request_without_a_seed_gets_a_new_one_each_time(choice):
    drawn = [choice_seed(None, choice) for _ in range(3)]
    assert len(set(drawn)) == 3
    assert all(0 <= seed < 2**63 for seed in drawn)


def test_choices_of_neighbouring_seeds_all_differ():
    seeds = {choice_seed(seed, choice) for seed in range(1000) for choice in range(20)}
    assert len(seeds) == 20_000


@pytest.mark.parametrize(
    ("seed", "choice", "expected"),
    [
        (0, 1, 7070836379803831727),
        (0, 2, 7960286522194355700),
        (7, 1, 7191089600892374487),
        (2**63 - 1, 3, 7788293109649129872),
    ],
)
def test_seeds_never_change_between_versions(seed, choice, expected):
    assert choice_seed(seed, choice) == expected
