"""Which forward pass computes decode groups: each rule by which measurements decide."""

from __future__ import annotations

import pytest

from sgl_batch.core.decode_choice import (
    COROUTINE,
    DEFAULT,
    EAGER,
    MODES,
    SGLANG,
    DecodeForms,
    Failed,
    Measured,
    candidates,
    choose,
    refusal,
    step_of,
)

TOKENS = (5, 9, 2)


def measured(*ms, tokens=TOKENS, margins=()):
    return Measured(seconds=tuple(one / 1e3 for one in ms), tokens=tokens, margins=margins)


@pytest.mark.parametrize(("other_ms", "chosen"), [(9.53, COROUTINE), (9.52, SGLANG), (5.0, SGLANG), (11.0, COROUTINE)])
def test_another_mode_must_win_by_five_per_cent(other_ms, chosen):
    outcomes = {COROUTINE: measured(10.0), SGLANG: measured(other_ms)}
    choice = choose((COROUTINE, SGLANG), outcomes)
    assert choice.mode == chosen
    assert choice.numbers == {COROUTINE: (0.01,), SGLANG: (other_ms / 1e3,)}


def test_the_fastest_of_several_winners_is_taken_and_the_sentence_says_by_how_much():
    choice = choose((SGLANG, COROUTINE, EAGER), {SGLANG: measured(10), COROUTINE: measured(5), EAGER: measured(8)})
    assert choice.mode == COROUTINE
    expected = "coroutine: 5.00 ms a decode step, 2.00 times as fast as sglang (10.00 ms), with the same tokens"
    assert choice.why == expected


def test_a_winner_of_large_groups_may_not_lose_small_ones():
    def chosen(small_ms):
        return choose((COROUTINE, SGLANG), {COROUTINE: measured(10, 2), SGLANG: measured(5, small_ms)})

    assert chosen(2.1).mode == SGLANG
    assert chosen(2.2).mode == COROUTINE
    assert "sglang takes 2.20 ms with a small group, and coroutine 2.00 ms" in chosen(2.2).why


def test_other_tokens_lose_unless_the_reference_nearly_ties():
    def chosen(margins):
        reference = measured(10, margins=margins)
        return choose((COROUTINE, SGLANG), {COROUTINE: reference, SGLANG: measured(1, tokens=(5, 8, 2))})

    assert chosen((0.5, 0.02, 0.5)).mode == SGLANG
    assert chosen((0.02, 0.5, 0.02)).mode == COROUTINE
    assert chosen(()).mode == COROUTINE
    assert chosen(()).why.endswith("sglang gave 1 other tokens than coroutine")


def test_a_mode_that_fails_falls_back_with_one_line():
    choice = choose((COROUTINE, SGLANG), {COROUTINE: measured(10), SGLANG: Failed(why="RuntimeError: no kernel")})
    assert (choice.mode, choice.why) == (
        COROUTINE,
        "coroutine: 10.00 ms a decode step; sglang failed: RuntimeError: no kernel",
    )
    other = choose((COROUTINE, SGLANG), {COROUTINE: Failed(why="RuntimeError: no kernel"), SGLANG: measured(10)})
    assert (other.mode, other.why) == (
        SGLANG,
        "sglang: 10.00 ms a decode step; coroutine failed: RuntimeError: no kernel",
    )


def test_without_any_measurement_nothing_switches():
    failed = choose((COROUTINE, SGLANG), {COROUTINE: Failed(why="a"), SGLANG: Failed(why="b")})
    assert (failed.mode, failed.why) == (COROUTINE, "coroutine: nothing could be measured (coroutine: a; sglang: b)")
    assert choose((COROUTINE, SGLANG), {}).mode == COROUTINE
    late = choose((COROUTINE, SGLANG), {COROUTINE: measured(10)})
    assert late.why.endswith("sglang was not measured: the time was up")


def test_the_deterministic_mode_never_switches():
    outcomes = {COROUTINE: measured(10), SGLANG: measured(1)}
    assert choose((COROUTINE, SGLANG), outcomes).mode == SGLANG
    assert choose((COROUTINE, SGLANG), outcomes, deterministic=True).mode == COROUTINE


def test_each_candidate_computes_the_largest_group_in_a_different_way():
    def of(**forms):
        return candidates(DecodeForms(**{"has_adapter": True, **forms}))

    assert of() == (DEFAULT, SGLANG)
    assert of(own_graph=True) == (DEFAULT, EAGER, SGLANG)
    assert of(own_graph=True, obstacle="several ranks") == (DEFAULT, EAGER)
    assert of(sglang_graph=True, own_graph=True) == (DEFAULT, COROUTINE, EAGER)
    assert of(has_adapter=False) == (DEFAULT,)
    assert of(obstacle="several ranks") == (DEFAULT,)


def test_a_requested_mode_that_cannot_compute_the_groups_is_refused():
    ranks, unknown = DecodeForms(has_adapter=True, obstacle="several ranks"), DecodeForms(has_adapter=False)
    assert [refusal(mode, ranks) for mode in MODES] == [None, None, None, "several ranks"]
    adapter = "this model has no family adapter"
    assert [refusal(mode, unknown) for mode in MODES] == [None, adapter, adapter, None]


def test_a_choice_holds_the_step_time_of_its_mode_and_the_hosts_part():
    def of(ms, host_ms):
        return Measured(seconds=(ms / 1e3,), tokens=(1,), host_seconds=(host_ms / 1e3,))

    choice = choose((COROUTINE, SGLANG), {COROUTINE: of(10, 9), SGLANG: of(5, 1)})
    assert step_of(choice) == (0.005, 0.001)
    assert step_of(choose((COROUTINE,), {})) == (None, None)
