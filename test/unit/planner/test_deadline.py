"""Deadlines: how they are written, and how many requests are done in time."""

from __future__ import annotations

import pytest

from sgl_batch.errors import ConfigError
from sgl_batch.planner.deadline import parse_deadline, within_deadline


@pytest.mark.parametrize(("text", "seconds"), [("90s", 90), ("10m", 600), ("1.5h", 5400), (" 2 h ", 7200)])
def test_a_deadline_has_a_unit(text, seconds):
    assert parse_deadline(text) == seconds


@pytest.mark.parametrize("text", ["", "10", "m", "0s", "0.0h", "-1m", "10 minutes", "1h30m", "1e3s", "9" * 400 + "s"])
def test_a_deadline_that_cannot_be_read_is_refused_with_an_example(text):
    with pytest.raises(ConfigError, match="90s, 10m or"):
        parse_deadline(text)


def test_a_batch_that_fits_is_whole():
    found = within_deadline(lambda count: 2.0 * count, 10, 20.0)
    assert (found.fits, found.count, found.count_s) == (True, 10, 20.0)


@pytest.mark.parametrize("deadline_s", [3.0, 4.9, 5.0, 30.1])
def test_of_a_batch_that_does_not_fit_the_most_requests_that_do_are_found(deadline_s):
    def seconds_of(count: int) -> float:
        return 3.0 + 0.01 * count

    found = within_deadline(seconds_of, 100_000, deadline_s)
    assert not found.fits
    assert found.count == 0 or found.count_s == seconds_of(found.count) <= deadline_s
    assert seconds_of(found.count + 1) > deadline_s


def test_a_large_batch_takes_few_predictions():
    asked: list[int] = []
    within_deadline(lambda count: asked.append(count) or float(count), 1 << 20, 1000.0)
    assert len(asked) <= 22
