"""What a run costs, before, during and after it."""

from __future__ import annotations

import io

import pytest

from sgl_batch.file_run.run_cost import PricedDisplay, RunCost
from sgl_batch.file_run.run_result import RunResult, RunStatus
from sgl_batch.file_run.summary import format_summary
from sgl_batch.jobs.cost import Cost
from sgl_batch.jobs.progress import ProgressTracker
from sgl_batch.jobs.progress_display import PlainDisplay

PLANNED = {
    "predicted": {"seconds": 1800.0},
    "workload": {"source": "sample", "requests": 1000, "prompt_tokens": 300_000, "output_tokens": 100_000},
}


def result(**changes):
    values = {"ok": 500, "failed": 0, "wall_s": 3600.0, "tokens_in": 60_000, "tokens_out": 40_000, "kept": 0}
    return RunResult(status=RunStatus.COMPLETED, message=None, total=500, **(values | changes))


def test_before_a_run_the_plan_says_what_it_costs():
    cost = RunCost.begin(8.0, PLANNED, 1000)
    assert cost.before == Cost(
        amount=4.0, per_million_lines=4000.0, per_million_output_tokens=40.0, per_million_tokens=10.0
    )
    assert cost.line().startswith("4.00 (by the plan); a million lines 4,000.00, output tokens 40.00")
    assert cost.as_dict()["before"]["amount"] == 4.0


def test_a_run_of_fewer_lines_than_the_predicted_batch_costs_less():
    half = RunCost.begin(8.0, PLANNED, 500).before
    assert (half.amount, half.per_million_lines) == (2.0, 4000.0)


def test_a_line_of_several_choices_is_one_line():
    cost = RunCost.begin(8.0, PLANNED, 250, 250).before
    assert (cost.amount, cost.per_million_lines, cost.per_million_output_tokens) == (4.0, 16_000.0, 40.0)


def test_without_a_prediction_nothing_is_said_before_a_run():
    cost = RunCost.begin(8.0, {"source": "conservative defaults"}, 500)
    assert (cost.line(), cost.as_dict()) == ("", {"price_per_hour": 8.0, "before": None})


def test_after_a_run_its_time_is_what_it_costs():
    cost = RunCost.begin(8.0, PLANNED, 500).at_end(result().engine_time)
    assert (cost.as_dict()["amount"], cost.as_dict()["per_million_tokens"]) == (8.0, 80.0)
    shown = format_summary(result(cost=cost)).splitlines()[3]
    assert shown.startswith("  cost        8.00 (by the plan 2.00); a million lines 16,000.00, output")
    assert "cost" not in format_summary(result())


def test_lines_of_an_earlier_run_are_not_paid_again():
    time = result(kept=400).engine_time
    assert RunCost(price_per_hour=8.0).at_end(time).after.per_million_lines == pytest.approx(80_000.0)


def test_progress_shows_the_cost_so_far_and_then_of_the_whole():
    now, stream = [0.0], io.StringIO()
    tracker = ProgressTracker(4, lambda: now[0])
    display = PricedDisplay(PlainDisplay(stream), 3600.0)
    display.update(tracker.snapshot())
    for _ in range(4):
        now[0] += 10
        tracker.line_done(failed=False)
        display.update(tracker.snapshot())
    display.close(tracker.snapshot())
    costs = [line.partition("cost ")[2].partition(",")[0] for line in stream.getvalue().splitlines()]
    assert costs == ["0.00", "10.00 of about 40.00", "20.00 of about 40.00", "30.00 of about 40.00", "40.00", "40.00"]
