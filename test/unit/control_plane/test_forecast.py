"""A run of several instances is predicted from the rates of their plans."""

from __future__ import annotations

import pytest

from sgl_batch.control_plane.instances.forecast import OWN_PLANS, forecast_of
from sgl_batch.core.plan_rates import PlanRates
from sgl_batch.planner.feeding import feeding_s
from sgl_batch.planner.workload import Request, Workload

ONE = PlanRates(prompt_tokens_per_s=1000.0, output_tokens_per_s=100.0, step_s=0.01)
BATCH = Workload(requests=[Request(50, 10)] * 200, count=400, source="estimated")


def test_instances_that_are_not_ready_yet_count_as_the_others() -> None:
    forecast = forecast_of(ONE, 1, 2)
    assert forecast is not None
    # 20,000 tokens of prompts at 2,000 a second, 4,000 of outputs at 200.
    found = forecast.predict(BATCH)
    assert found.prefill_s == pytest.approx(10.0)
    assert found.seconds == pytest.approx(30.0 + feeding_s(400, 2))


def test_no_batch_is_shorter_than_its_longest_output() -> None:
    forecast = forecast_of(ONE, 2, 2)
    assert forecast is not None
    alone = Workload(requests=[Request(1, 5000)], count=1)
    assert forecast.predict(alone).seconds >= 5000 * ONE.step_s


def test_the_manifest_says_the_batch_and_its_predicted_time() -> None:
    forecast = forecast_of(ONE, 1, 2)
    assert forecast is not None
    planned = forecast.planned(BATCH)
    assert planned["source"].startswith(f"{OWN_PLANS}; predicted 30.0 s for 400 requests on 2 instances (estimated)")
    assert planned["workload"]["output_tokens"] == 4000
    assert planned["predicted"] == {"seconds": pytest.approx(forecast.predict(BATCH).seconds, abs=0.001)}


def test_plans_without_rates_predict_nothing() -> None:
    assert forecast_of(None, 2, 2) is None
    assert forecast_of(ONE, 0, 2) is None
