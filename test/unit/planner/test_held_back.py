"""What a profile says about its own fit."""

from __future__ import annotations

from dataclasses import replace

import made_profiles as made
import pytest

from sgl_batch.planner.held_back import held_back, usual_ratios
from sgl_batch.planner.samples import PassSample


def _noisy(sample: PassSample) -> PassSample:
    return replace(sample, experts_s=sample.experts_s * (2 if sample.rows == 8 else 1))


def test_sizes_between_the_ends_are_held_back_once_each():
    found = held_back(made.profile(), made.layers())
    sizes = {(one.sample.decode, one.sample.rows) for one in found}
    assert sizes == {(True, rows) for rows in made.ROWS[1:-1]} | {(False, rows) for rows in made.TOKENS[1:-1]}
    assert len(found) == len({id(one.sample) for one in found})


def test_a_fit_of_simple_laws_is_close_and_an_outlier_is_told():
    plain, noisy = (
        usual_ratios(held_back(replace(made.profile(), passes=passes), made.layers()), share=1.0)
        for passes in (made.profile().passes, tuple(map(_noisy, made.profile().passes)))
    )
    assert 0.8 < plain[0] <= plain[1] < 1.25
    assert noisy[1] > 1.4


def test_the_middle_share_leaves_outliers_out():
    found = held_back(made.profile(), made.layers())
    ratios = sorted(one.ratio() for one in found)
    low, high = usual_ratios(found, share=0.5)
    assert ratios[0] < low <= high < ratios[-1]
    assert sum(low <= ratio <= high for ratio in ratios) == pytest.approx(len(ratios) / 2, abs=2)


def test_a_profile_of_few_sizes_says_nothing():
    few = tuple(one for one in made.profile().passes if one.rows in (1, 1024))
    assert held_back(replace(made.profile(), passes=few), made.layers()) == []
