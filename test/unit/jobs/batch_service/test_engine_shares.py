"""How jobs share the engine's time, what that costs, and that a restart keeps it."""

from __future__ import annotations

import asyncio

import pytest
from running_service import Clock, create, line, lines, service_in, until
from scripted_engines import ScriptedSource

from sgl_batch.core.plan_rates import PlanRates
from sgl_batch.jobs.batch_service.engine_shares import EngineShare, EngineShares


@pytest.fixture
def clock():
    return Clock()


def test_a_job_alone_has_all_of_the_time_in_which_it_has_lines(clock):
    shares, job = EngineShares(clock), EngineShare()
    clock.now += 100
    shares.enter(job)
    shares.enter(job)
    clock.now += 4
    shares.leave(job)
    clock.now += 3
    shares.leave(job)
    clock.now += 100
    shares.settle(job)
    assert (job.seconds, shares.busy_s()) == (pytest.approx(7.0), 7.0)


def test_each_line_in_the_engine_has_an_equal_part_of_the_time(clock):
    shares, small, large = EngineShares(clock), EngineShare(), EngineShare()
    shares.enter(small)
    clock.now += 5
    for _ in range(3):
        shares.enter(large)
    clock.now += 8
    shares.leave(small)
    clock.now += 2
    for job in (small, large):
        shares.settle(job)
    assert (small.seconds, large.seconds) == (pytest.approx(5 + 2), pytest.approx(6 + 2))
    assert shares.busy_s() == 15


def test_a_clock_that_is_set_back_adds_no_time(clock):
    shares, job = EngineShares(clock), EngineShare()
    shares.enter(job)
    clock.now -= 50
    shares.settle(job)
    clock.now += 2
    shares.settle(job)
    assert job.seconds == pytest.approx(2.0)


class Held:
    """A script under which lines whose prompt begins with "hold" wait for `release`."""

    def __init__(self):
        self.release = asyncio.Event()

    async def __call__(self, engine, body):
        if str(body["prompt"]).startswith("hold"):
            await self.release.wait()


async def in_flight(service, *batches):
    """Wait until each job has a line in flight, and none that can be answered at once."""
    for batch in batches:
        shown = (await service.get_batch(batch.id)).x_sgl_batch
        while shown.get("in_flight") != 1:
            await asyncio.sleep(0.001)
            shown = (await service.get_batch(batch.id)).x_sgl_batch


def test_two_jobs_share_the_time_and_a_restart_keeps_it(tmp_path, clock):
    async def scenario():
        held = Held()
        source = ScriptedSource(held)
        async with service_in(tmp_path, source, clock=clock, price_per_hour=7200.0) as service:
            first = await create(service, [*lines(3), line("h", "hold")])
            await in_flight(service, first)
            while (await service.get_batch(first.id)).request_counts["completed"] < 3:
                await asyncio.sleep(0.001)
            clock.now += 6
            second = await create(service, [line("g", "hold")])
            await in_flight(service, second)
            clock.now += 4
            shown = (await service.get_batch(first.id)).x_sgl_batch
            assert shown["engine_time"] == {"seconds": 8.0, "lines": 3, "input_tokens": 21, "output_tokens": 15}
            assert shown["expected_engine_time"]["judged_by"] == "rate"
            assert (shown["expected_engine_time"]["lines"], shown["expected_engine_time"]["seconds"]) == (4, 10.667)
            assert (shown["cost"]["amount"], shown["cost"]["expected"]["amount"]) == (16.0, 21.334)
            assert (await service.get_batch(second.id)).x_sgl_batch["cost"]["amount"] == 4.0
            snapshot = service.snapshot()
            assert (snapshot.counters["engine_s"], snapshot.price_per_hour) == (10.0, 7200.0)
        clock.now += 1000  # nothing runs
        held.release.clear()
        async with service_in(tmp_path, source, clock=clock) as service:
            await in_flight(service, first, second)
            clock.now += 2
            held.release.set()
            done = [(await until(service, batch.id)).x_sgl_batch for batch in (first, second)]
            assert [one["engine_time"]["seconds"] for one in done] == [9.0, 3.0]
            assert done[0]["engine_time"]["lines"] == 4
            assert not any({"cost", "expected_engine_time"} & set(one) for one in done)
        async with service_in(tmp_path, source, clock=clock, price_per_hour=3600.0) as service:
            cost = (await service.get_batch(first.id)).x_sgl_batch["cost"]
            assert (cost["amount"], cost["per_million_lines"], "expected" in cost) == (9.0, 2.25e6, False)

    asyncio.run(scenario())


def test_before_the_first_answer_the_plan_says_what_a_job_will_cost(tmp_path, clock):
    rates = PlanRates(prompt_tokens_per_s=1e6, output_tokens_per_s=0.1, step_s=0.01)  # a line takes 40 s

    async def scenario():
        source = ScriptedSource(Held(), plan_rates=rates)
        async with service_in(tmp_path, source, clock=clock, price_per_hour=3600.0) as service:
            batch = await create(service, [line("a", "hold")])
            await in_flight(service, batch)
            shown = (await service.get_batch(batch.id)).x_sgl_batch
            assert shown["expected_engine_time"]["judged_by"] == "plan"
            assert (shown["cost"]["amount"], shown["cost"]["per_million_lines"]) == (0.0, None)
            assert shown["cost"]["expected"]["amount"] == 40.0
            assert shown["cost"]["expected"]["per_million_output_tokens"] == 1e7
            clock.now += 50
            shown = (await service.get_batch(batch.id)).x_sgl_batch
            assert (shown["cost"]["amount"], shown["cost"]["expected"]["amount"]) == (50.0, 50.0)

    asyncio.run(scenario())


def test_a_job_pays_for_lines_that_it_gave_up_and_not_for_lines_of_an_earlier_job(tmp_path, clock):
    async def scenario():
        held = Held()
        async with service_in(tmp_path, ScriptedSource(held), clock=clock, price_per_hour=3600.0) as service:
            first = await create(service, [*lines(2), line("h", "hold"), line("bad", "x", max_tokens=0)])
            while (await service.get_batch(first.id)).request_counts["completed"] < 2:
                await asyncio.sleep(0.001)
            await in_flight(service, first)
            clock.now += 5
            await service.cancel_batch(first.id)
            ended = (await until(service, first.id)).x_sgl_batch["engine_time"]
            assert ended == {"seconds": 5.0, "lines": 2, "input_tokens": 14, "output_tokens": 10}
            second = await service.create_batch({"continue_from": first.id})
            await in_flight(service, second)
            clock.now += 3
            held.release.set()
            done = await until(service, second.id)
            assert done.request_counts["completed"] == 3
            assert done.x_sgl_batch["engine_time"] == {
                "seconds": 3.0,
                "lines": 1,
                "input_tokens": 7,
                "output_tokens": 5,
            }

    asyncio.run(scenario())
