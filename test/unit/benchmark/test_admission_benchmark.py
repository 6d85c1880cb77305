"""The arithmetic of the measurement of admission."""

from __future__ import annotations

import random
import statistics

import admission
import pytest


def test_lengths_have_the_mean_and_a_long_tail():
    lengths = admission.answer_lengths(400, 48, 1024, random.Random(0))
    assert statistics.mean(lengths) == pytest.approx(48, rel=0.02)
    assert max(lengths) > 5 * statistics.median(lengths)
    assert min(lengths) >= 1
    assert max(admission.answer_lengths(400, 48, 100, random.Random(0))) == 100


@pytest.mark.parametrize(
    ("tokens", "wanted", "length", "stop"),
    [
        ([5, 6, 7], 2, 2, 6),
        ([5, 6, 5, 6, 7, 8], 3, 5, 7),  # the first token from there on that is new
        ([5, 6, 5, 6], 3, 2, 6),  # the last one that was new
        ([5, 6, 2, 7], 4, 3, None),  # the end of sequence
        ([5, 6, 2, 7], 2, 2, 6),
        ([2, 6], 1, 1, None),
    ],
)
def test_an_output_is_stopped_by_a_token_that_is_new_in_it(tokens, wanted, length, stop):
    assert admission.stopped(tokens, wanted, [2]) == (length, stop)


def line(prompt: int) -> admission.Line:
    return admission.Line(prompt=[5] * prompt, seed=3, length=7, stop=9, bias={})


def test_a_tenth_is_of_what_all_lines_reserve():
    assert admission.pages_of([line(1), line(33)], 16) == 64 + 66


def test_only_the_case_that_knows_the_lengths_says_them():
    assert admission.sampling(line(1), known=True)["max_new_tokens"] == 7
    asked = admission.sampling(line(1), known=False)
    assert (asked["max_new_tokens"], asked["stop_token_ids"]) == (1024, [9])


def test_the_report_has_ratios_to_reserve_and_to_known_lengths():
    def run(seconds: float) -> admission.Run:
        counters = dict.fromkeys(admission._COUNTERS, 2)
        return admission.Run(seconds=seconds, counters=counters, same_tokens=seconds != 3)

    seconds = dict(zip(admission.CASES, (30.0, 3.0, 12.0, 10.0), strict=True))
    rounds = [{f"no store, {case}": run(value) for case, value in seconds.items()}] * 2
    text = admission.markdown("Lines.", rounds)
    row = next(each for each in text.splitlines() if "forecast" in each)
    assert "0.40" in row
    assert "1.20" in row
    assert "yes" in row
    assert "NO" in next(each for each in text.splitlines() if "two-page" in each)
