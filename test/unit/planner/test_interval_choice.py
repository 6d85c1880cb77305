"""When a plan has another interval than the engine's default."""

from __future__ import annotations

from dataclasses import replace

from sgl_batch.planner.candidate import INCLUSIVE, Candidate, flags_of
from sgl_batch.planner.interval_choice import settle_interval
from sgl_batch.planner.schedule import Prediction

PLAIN = Candidate(b_attn_prefill=8, b_moe_prefill=8, b_attn_decode=8, b_moe_decode=8)
DEFAULT_S = 100.0


def settled(seconds_of, candidate=PLAIN, given=()):
    found, prediction = settle_interval(
        candidate,
        Prediction(seconds=DEFAULT_S),
        lambda one: None if (seconds := seconds_of(one)) is None else Prediction(seconds=seconds),
        dict.fromkeys(given),
    )
    return (found.boundary_tokens, found.ready_ahead), prediction.seconds


def by_interval(seconds):
    return lambda one: seconds.get(one.boundary_tokens, DEFAULT_S) if one.ready_ahead is None else DEFAULT_S


def test_a_gain_that_predictions_cannot_tell_leaves_the_default():
    assert settled(by_interval({8: 97})) == ((None, None), DEFAULT_S)


def test_of_intervals_that_are_surely_faster_the_longest_is_taken():
    assert settled(by_interval({8: 80, 16: 81, 32: 99})) == ((16, None), 81)


def test_an_interval_of_which_shorter_ones_gain_nothing_is_faster_by_chance():
    assert settled(by_interval({8: 99, 16: 80, 32: 80})) == ((None, None), DEFAULT_S)


def test_what_the_user_gave_stays():
    assert settled(lambda one: 50, given=["boundary_tokens", "ready_ahead"]) == ((None, None), DEFAULT_S)
    assert settled(lambda one: 50, given=["ready_ahead"])[0] == (32, None)


def test_sequences_ahead_are_chosen_behind_the_interval():
    assert settled(lambda one: 70 if one.ready_ahead == 2.0 else None) == ((None, 2.0), 70)


def test_with_a_store_nothing_is_chosen():
    assert settled(lambda one: 1, replace(PLAIN, kv=INCLUSIVE)) == ((None, None), DEFAULT_S)


def test_the_choice_is_flags_of_run():
    assert flags_of(replace(PLAIN, boundary_tokens=16, ready_ahead=2.0).settings)[-4:] == [
        *("--boundary-tokens", "16"),
        *("--ready-ahead", "2.0"),
    ]
