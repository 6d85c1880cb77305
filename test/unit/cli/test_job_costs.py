"""How `sgl-batch jobs` shows what jobs cost."""

from __future__ import annotations

import io

import pytest

from sgl_batch.cli.jobs.cards import card, last_words, table
from sgl_batch.cli.jobs.options import parse_jobs_options
from sgl_batch.cli.jobs.prices import at_price
from sgl_batch.cli.jobs.watching import ChangesDisplay, watch
from sgl_batch.errors import ConfigError
from sgl_batch.jobs.cost import EngineTime

SPENT = EngineTime(seconds=900.0, lines=2000, input_tokens=300_000, output_tokens=100_000)
MILLION = "a million lines 1,000.00, output tokens 20.00, prompt and output tokens 5.00"


def job(judged_by=None, status="in_progress", **more):
    expected = {"expected_engine_time": {**SPENT.times(2).as_dict(), "judged_by": judged_by}} if judged_by else {}
    counts = {"total": 4000, "completed": 2000, "failed": 0}
    extra = {"engine_time": SPENT.as_dict(), **expected, **more}
    return {"id": "batch_1", "status": status, "request_counts": counts, "x_sgl_batch": extra}


def test_without_a_price_no_cost_is_shown():
    for text in (card(job(), 0), table([job()], 0), last_words(job())):
        assert "cost" not in text
    assert at_price(job(), None) == job()


def test_the_users_price_takes_the_place_of_the_servers():
    found = at_price(job(cost={"amount": 77.0}), 8.0)["x_sgl_batch"]["cost"]
    assert (found["price_per_hour"], found["amount"]) == (8.0, 2.0)


@pytest.mark.parametrize(("judged_by", "words"), [("rate", ""), ("plan", " (by the plan)")])
def test_a_running_job_shows_its_cost_so_far_and_as_a_whole(judged_by, words):
    assert f"cost      2.00 of about 4.00{words}; {MILLION}\n" in card(at_price(job(judged_by), 8.0), 0) + "\n"
    assert table([at_price(job(judged_by), 8.0)], 0).split()[-1] == "2.00/4.00"


def test_an_ended_job_shows_its_cost():
    ended = at_price(job(status="completed"), 8.0)
    assert last_words(ended).splitlines()[-1] == f"cost 2.00; {MILLION}"
    assert table([ended, {"id": "batch_0"}], 0).splitlines()[-1].endswith("-")


def test_a_server_that_does_not_say_the_time_gives_no_cost():
    other = {"id": "batch_1", "status": "completed"}
    assert "cost      unknown: the server does not say what time" in card(at_price(other, 8.0), 0)
    assert table([at_price(other, 8.0)], 0).split()[-1] == "-"


def test_a_watched_job_shows_its_cost():
    stream = io.StringIO()
    watch(lambda: at_price(job(status="completed"), 8.0), ChangesDisplay(stream))
    assert ", cost 2.00\n" in stream.getvalue()


def test_what_is_no_price_is_refused():
    with pytest.raises(ConfigError, match="--price-per-hour is 'much'; it takes a number"):
        parse_jobs_options(["list", "--price-per-hour", "much"])
    assert parse_jobs_options(["get", "batch_1", "--price-per-hour", "2"]).price_per_hour == 2.0
