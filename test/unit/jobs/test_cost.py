"""What the time of engines costs."""

from __future__ import annotations

import pytest

from sgl_batch.errors import ConfigError
from sgl_batch.jobs.cost import Cost, EngineTime, cost_of, job_cost, money, parse_price, per_million_text

# A quarter of an hour.
TIME = EngineTime(seconds=900.0, lines=2000, input_tokens=300_000, output_tokens=100_000)


def test_a_cost_is_the_price_of_the_time_and_by_what_was_answered_in_it():
    expected = Cost(amount=2.0, per_million_lines=1000.0, per_million_output_tokens=20.0, per_million_tokens=5.0)
    assert cost_of(TIME, 8.0) == expected


def test_the_price_is_of_one_instance():
    three = cost_of(TIME, 8.0, instances=3)
    assert (three.amount, three.per_million_lines) == (6.0, 3000.0)


def test_what_answered_nothing_has_no_cost_of_a_million():
    assert cost_of(EngineTime(seconds=3600.0), 8.0) == Cost(amount=8.0)
    assert per_million_text(Cost(amount=8.0).as_dict()) == ""


def test_the_cost_of_a_running_job_has_that_of_the_whole_beside_it():
    whole = {**TIME.times(4).as_dict(), "judged_by": "plan"}
    found = job_cost(TIME.as_dict(), whole, 8.0)
    assert (found["price_per_hour"], found["amount"], found["per_million_lines"]) == (8.0, 2.0, 1000.0)
    assert found["expected"] == {**cost_of(TIME, 8.0).as_dict(), "amount": 8.0}
    assert "expected" not in job_cost(TIME.as_dict(), None, 8.0)


@pytest.mark.parametrize(
    ("amount", "text"),
    [(1234.567, "1,234.57"), (1.0, "1.00"), (0.5, "0.500"), (0.012345, "0.0123"), (2.5e-06, "0.00000250"), (0, "0.00")],
)
def test_small_amounts_keep_three_digits(amount, text):
    assert money(amount) == text


def test_the_figures_for_a_million_are_one_line():
    text = "a million lines 1,000.00, output tokens 20.00, prompt and output tokens 5.00"
    assert per_million_text(cost_of(TIME, 8.0).as_dict()) == text


@pytest.mark.parametrize(("given", "price"), [(None, None), ("2.5", 2.5), ("0", 0.0), (3, 3.0)])
def test_a_price_is_a_number(given, price):
    assert parse_price(given) == price


@pytest.mark.parametrize("given", ["-1", "nan", "inf", "cheap", "", True])
def test_what_is_no_price_is_refused_in_one_line(given):
    with pytest.raises(ConfigError, match=r"--price-per-hour is .*; it takes a number of at least 0") as error:
        parse_price(given)
    assert "\n" not in str(error.value)
