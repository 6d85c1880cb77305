"""What is said early about a job's window, and from what."""

from __future__ import annotations

import asyncio

import pytest
from running_service import Clock, create, line, lines, service_in, until
from scripted_engines import ScriptedSource

from sgl_batch.core.plan_rates import Load, PlanRates
from sgl_batch.jobs.batch_service.window_judgement import PlannedWork, by_plan, by_rate

RATES = PlanRates(prompt_tokens_per_s=100.0, output_tokens_per_s=10.0, step_s=0.05)
# Lines have 4 output tokens: a line takes 40 s, but for its prompt.
SLOW = PlanRates(prompt_tokens_per_s=1e6, output_tokens_per_s=0.1, step_s=0.01)
LOAD = Load(prompt_tokens=1000, output_tokens=500, longest_output=100)


def judged(own=LOAD, others=None, elapsed_s=0.0, window_s=70.0):
    left = own + (others or Load())
    return by_plan(PlannedWork(rates=RATES, left=left), own, elapsed_s, 1000.0, 1000.0 + window_s)


def test_a_load_takes_its_prompts_and_its_outputs_and_no_less_than_its_longest_output():
    assert RATES.seconds(LOAD) == 60.0
    assert RATES.seconds(Load(output_tokens=500, longest_output=2000)) == 100.0
    assert RATES.seconds(LOAD.share(0.5)) == 30.0
    assert RATES.seconds(LOAD.share(0)) == RATES.seconds(Load()) == 0


def test_small_jobs_run_together():
    one = Load(output_tokens=10, longest_output=10)
    assert RATES.seconds(Load(output_tokens=1, longest_output=100) + one) == 5.0


def test_a_job_that_the_plan_ends_in_time_is_not_at_risk():
    found = judged()
    assert (found["judged_by"], found["eta_s"], found["expected_completion_at"]) == ("plan", 60.0, 1060)
    assert not found["window_at_risk"]
    text = "takes 60 s if outputs reach their limits, and ends 10 s before the end of its window"
    assert found["window_text"].endswith(text)


def test_a_window_that_the_plan_cannot_meet_is_said_with_by_how_much():
    found = judged(window_s=45.0)
    assert found["window_at_risk"]
    assert "ends 15 s after the end of its window; lines that are not finished by then" in found["window_text"]


@pytest.mark.parametrize(
    ("left_s", "text"), [(119.4, "119 s"), (150, "2 min"), (7_140, "119 min"), (86_342, "23 h 59 min")]
)
def test_long_times_are_said_in_hours_and_minutes(left_s, text):
    assert f"ends {text} before the end" in judged(window_s=60.0 + left_s)["window_text"]


def test_the_work_of_other_jobs_counts_as_before():
    found = judged(others=Load(output_tokens=200, longest_output=3))
    assert (found["eta_s"], found["window_at_risk"]) == (80.0, True)
    assert "takes 60 s beside 20 s of other jobs" in found["window_text"]


@pytest.mark.parametrize(("elapsed_s", "eta_s"), [(20.0, 60.0), (500.0, 20.0)])
def test_time_that_passes_counts_for_the_jobs_own_work(elapsed_s, eta_s):
    assert judged(others=Load(output_tokens=200), elapsed_s=elapsed_s)["eta_s"] == eta_s


def test_lengths_that_are_not_known_judge_nothing():
    assert judged(own=Load(), others=LOAD) == {}


def test_a_measured_rate_says_so():
    found = by_rate(30.0, 1000.0, 1010.0)
    assert (found["judged_by"], found["window_at_risk"]) == ("rate", True)
    assert found["window_text"].startswith("at this rate the job ends 20 s after the end of its window")


def test_before_the_first_line_the_plan_says_whether_the_window_can_be_met(tmp_path):
    async def scenario():
        clock, release = Clock(), asyncio.Event()

        async def hold(engine, body):
            if body["prompt"] != "at once":
                await release.wait()

        async def shown(batch):
            return (await service.get_batch(batch.id)).x_sgl_batch

        source = ScriptedSource(hold, plan_rates=SLOW)
        async with service_in(tmp_path, source, clock=clock) as service:
            first = await create(service, lines(3), completion_window="3m")
            await until(service, first.id, "in_progress")
            alone = await shown(first)
            assert (alone["judged_by"], alone["eta_s"], alone["window_at_risk"]) == ("plan", 120.0, False)
            assert alone["window_text"].startswith("by the plan the job takes 120 s if outputs")
            second = await create(service, lines(2), completion_window="3m")
            await until(service, second.id, "in_progress")
            later = await shown(second)
            assert (later["eta_s"], later["window_at_risk"]) == (200.0, True)
            assert later["window_text"].startswith("by the plan the job takes 80 s beside 120 s of other jobs if")
            assert "ends 20 s after the end of its window" in later["window_text"]
            listed = (await service.list_batches()).data
            assert [one.x_sgl_batch["eta_s"] for one in listed] == [200.0, 200.0]
        async with service_in(tmp_path, source, clock=clock) as service:  # the lengths outlive the server
            assert (await until(service, second.id, "in_progress")).x_sgl_batch["eta_s"] == 200.0
            third = await create(service, [line("a", "at once"), line("b")])
            while (await service.get_batch(third.id)).request_counts["completed"] < 1:
                await asyncio.sleep(0.001)
            assert (await shown(third))["judged_by"] == "rate"
            release.set()
            for batch in (first, second):
                assert (await until(service, batch.id)).status == "completed"

    asyncio.run(scenario())
