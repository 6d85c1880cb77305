"""Bars of the long tail: ratios of the same rounds, verdicts by the median, and what the limiting resource allows."""

from __future__ import annotations

import pytest
from long_tail.bars import Rates, bars, bound, ratio


def rates(number=1, read=(10.0, 14.0), products=(2.0, 4.0)):
    return Rates(round=number, read=read, products=products)


def test_a_bar_is_judged_by_the_median_of_ratios_of_the_same_round():
    seconds = {"a separate": {1: 10.0, 2: 20.0, 3: 10.0}, "a all": {1: 11.0, 2: 21.0, 3: 12.0, 4: 99.0}}
    bar = bars(seconds, [], {})[0]
    assert (bar.reached.median, bar.reached.low, bar.reached.high) == pytest.approx((1.10, 1.05, 1.20))
    assert bar.met
    assert bar.share == pytest.approx(1 / 1.1)


def test_few_sequences_are_compared_with_the_longest_where_it_takes_longer_than_separate_engines():
    seconds = {"b separate": {1: 4.0, 2: 4.0, 3: 4.0}, "b longest": {1: 3.0, 2: 5.0}}
    assert bound("b", seconds) == {1: 4.0, 2: 5.0}
    assert bound("a", {"a separate": {1: 7.0}}) == {1: 7.0}


@pytest.mark.parametrize(("ours", "met"), [(5.0, True), (5.1, False)])
def test_a_time_meets_its_bar_up_to_the_ratio(ours, met):
    seconds = {"b separate": {1: 4.0}, "b longest": {1: 2.0}, "b all": {1: ours}}
    assert bars(seconds, [], {})[1].met is met


@pytest.mark.parametrize(("partition", "met"), [(10.0, True), (10.1, False)])
def test_a_speed_up_meets_its_bar_from_the_ratio_on(partition, met):
    seconds = {"c one rank": {1: 14.0}, "c partition": {1: partition}}
    bar = bars(seconds, [rates()], {})[2]
    assert bar.met is met
    assert bar.limit == pytest.approx(1.4)
    assert bar.share == pytest.approx(14.0 / partition / 1.4)


def test_drafts_are_limited_by_the_tokens_of_a_pass_and_prompts_by_products():
    seconds = {
        "c one rank": {1: 12.0},
        "c drafts": {1: 6.0},
        "c partition": {1: 8.0},
        "c all": {1: 5.0},
        "d one rank": {1: 9.0},
        "d partition": {1: 6.0},
    }
    *_, drafts, both, prompt = bars(seconds, [rates()], {"c drafts": 4.0, "c all": 2.0})
    assert (drafts.reached.median, drafts.limit, drafts.share) == (2.0, 4.0, 0.5)
    assert (both.reached.median, both.limit) == (1.6, 2.0)
    assert (prompt.reached.median, prompt.limit, prompt.met) == (1.5, 2.0, False)


def test_what_was_not_measured_is_not_judged():
    for bar in bars({"a all": {1: 1.0}, "a separate": {2: 1.0}}, [], {}):
        assert (bar.reached, bar.met, bar.share) == (None, None, None)


def test_the_ratio_of_rates_is_the_median_of_the_rounds():
    assert ratio([rates(1, read=(10.0, 13.0)), rates(2, read=(10.0, 19.0)), rates(3, read=(20.0, 30.0))], "read") == 1.5
    assert ratio([], "read") is None
