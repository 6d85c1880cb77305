"""What happens to lines in flight when an engine dies."""

from __future__ import annotations

import asyncio
from itertools import pairwise

import pytest
from running_service import create, line, lines, result_lines, service_in, until
from scripted_engines import ScriptedSource

from sgl_batch.jobs.batch_service.partial_outputs import PartialOutputs
from sgl_batch.jobs.job_store.result_rows import suspects_of_job


def killed_by(*poison, together=0):
    """Return a script of engines that die of these prompts, and need a moment for the others.

    The first engine waits until `together` lines are in flight.
    """
    all_here = asyncio.Event()

    async def script(engine, body):
        if len(engine.in_flight) >= together:
            all_here.set()
        await all_here.wait()
        await asyncio.sleep(0.001)
        if body["prompt"] in poison:
            engine.kill()

    return script


@pytest.mark.parametrize("number", [3, 16, 40, 300])
def test_a_line_that_kills_engines_gets_an_error_and_its_neighbours_complete(tmp_path, number):
    async def scenario():
        source = ScriptedSource(killed_by("poison", together=number))
        given = [line("poison"), *lines(number - 1)]
        async with service_in(tmp_path, source) as service:
            done = await until(service, (await create(service, given)).id)
            assert done.status == "completed"
            assert done.request_counts == {"total": number, "completed": number - 1, "failed": 1}
            assert len(await result_lines(service, done.output_file_id)) == number - 1
            (error,) = await result_lines(service, done.error_file_id)
            assert (error["custom_id"], error["response"]["status_code"]) == ("poison", 500)
            assert error["response"]["body"]["error"]["code"] == "engine_crashed"
            assert service.snapshot().counters["engine_deaths"] == len(source.engines) - 1
        suspects = [len(engine.died_with) for engine in source.engines if "poison" in engine.prompts]
        # Each death halves the suspects until they are few. Then lines run alone, and two engines die of this one.
        assert suspects[-2:] == [1, 1]
        for before, after in pairwise(suspects[:-1]):
            assert after <= (before + 1) // 2 if before > 16 else after == 1

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("most_deaths", "code"),
    [(2, None), (4, "kv_store_failed")],
    ids=["engines killed from outside", "a known cause of death"],
)
def test_a_line_is_not_blamed_for_one_death_or_a_death_of_known_cause(tmp_path, most_deaths, code):
    deaths = 0

    async def script(engine, body):
        nonlocal deaths
        await asyncio.sleep(0.001)
        if body["prompt"] == "unlucky" and deaths < most_deaths:
            deaths += 1
            engine.kill(code)

    async def scenario():
        async with service_in(tmp_path, ScriptedSource(script)) as service:
            done = await until(service, (await create(service, [line("unlucky"), *lines(2)])).id)
            assert done.request_counts == {"total": 3, "completed": 3, "failed": 0}

    asyncio.run(scenario())
    assert deaths == most_deaths, "all but the first death while it ran alone"


def test_several_lines_that_kill_engines_are_all_found(tmp_path):
    async def scenario():
        bad = [f"r{index}" for index in range(0, 100, 9)]
        source = ScriptedSource(killed_by(*bad))
        async with service_in(tmp_path, source) as service:
            done = await until(service, (await create(service, lines(100))).id)
            assert [one["custom_id"] for one in await result_lines(service, done.error_file_id)] == bad
            assert done.request_counts["completed"] == 88

    asyncio.run(scenario())


def test_lines_of_an_engine_that_was_killed_from_outside_all_complete(tmp_path):
    async def scenario():
        kill_now = asyncio.Event()

        async def script(engine, body):
            if not kill_now.is_set():
                if len(engine.in_flight) == 50:
                    kill_now.set()
                    engine.kill()
                await asyncio.Event().wait()

        async with service_in(tmp_path, ScriptedSource(script), max_in_flight=50) as service:
            done = await until(service, (await create(service, lines(120))).id)
            assert done.request_counts == {"total": 120, "completed": 120, "failed": 0}
            assert service.snapshot().counters["lines_rerun"] == 50

    asyncio.run(scenario())


def test_lines_resume_from_their_partial_outputs(tmp_path):
    async def scenario():
        async def script(engine, body):
            which = source.engines.index(engine)
            if len(engine.in_flight) == (40, 20, 0)[which]:
                engine.kill()
            if which < 2:
                await asyncio.Event().wait()

        source = ScriptedSource(script, generates=50)
        async with service_in(tmp_path, source, max_in_flight=40) as service:
            done = await until(service, (await create(service, lines(60))).id)
            assert done.request_counts["completed"] == 60
            counters = service.snapshot().counters
            assert len(service._dispatcher.partial_outputs) == 0, "nothing is kept of answered lines"
            assert service.snapshot().partial_output_tokens == 0
        first, second, third = (engine.resumed for engine in source.engines)
        assert first == {f"r{index}": [] for index in range(40)}
        assert second == {f"r{index}": list(range(50)) for index in range(20)}, (
            "half of the lines, with their partial outputs"
        )
        assert third == {
            **{f"r{index}": list(range(100)) for index in range(20)},
            **{f"r{index}": list(range(50)) for index in range(20, 40)},
            **{f"r{index}": [] for index in range(40, 60)},
        }
        assert (counters["lines_rerun"], counters["lines_resumed"]) == (60, 60)
        assert counters["tokens_resumed"] == 20 * 50 + 20 * 100 + 20 * 50

    asyncio.run(scenario())


def test_a_line_that_kills_engines_resumes_once_and_restarts_once_alone_before_it_is_failed(tmp_path):
    async def scenario():
        source = ScriptedSource(killed_by("poison", together=3), generates=50)
        async with service_in(tmp_path, source) as service:
            done = await until(service, (await create(service, [line("poison"), *lines(2)])).id)
            assert done.request_counts == {"total": 3, "completed": 2, "failed": 1}
            assert len(service._dispatcher.partial_outputs) == 0
        met = [engine.resumed["poison"] for engine in source.engines if "poison" in engine.prompts]
        assert met == [[], list(range(50)), []], "no innocent line is failed for its partial output"

    asyncio.run(scenario())


def test_partial_outputs_take_bounded_memory():
    partial_outputs = PartialOutputs(max_tokens=100)
    for index in range(3):
        partial_outputs.of((1, index)).put(0, range(40))
    assert [len(partial_outputs.of((1, index))) for index in range(3)] == [40, 40, 20]
    assert partial_outputs.num_tokens == 100
    partial_outputs.forget((1, 0))
    assert partial_outputs.num_tokens == 60
    partial_outputs.of((2, 0)).put(0, range(60))
    assert len(partial_outputs.of((2, 0))) == 40
    partial_outputs.forget_job(1)
    assert len(partial_outputs) == 1
    partial_outputs.of((2, 0)).put(40, range(100))
    assert len(partial_outputs.of((2, 0))) == 100


def test_suspects_are_known_after_a_restart_of_the_server(tmp_path):
    async def scenario():
        stopped = asyncio.Event()

        async def die_once(engine, body):
            if engine is source.engines[0]:
                if len(engine.in_flight) == 30:
                    engine.kill()
            else:
                stopped.set()
            await asyncio.Event().wait()

        source = ScriptedSource(die_once)
        async with service_in(tmp_path, source, max_in_flight=30) as service:
            batch = await create(service, lines(60))
            await stopped.wait()
        assert len(source.engines[1].prompts) == 15
        again = ScriptedSource(killed_by("r3"))
        async with service_in(tmp_path, again, max_in_flight=30) as service:
            done = await until(service, batch.id)
            assert done.request_counts == {"total": 60, "completed": 59, "failed": 1}
        # First the two groups of 15. The one with r3 runs again line by line, and that line twice.
        first = again.engines[0]
        assert first.prompts == [f"r{index}" for index in range(15)]
        assert len(again.engines) == 4

    asyncio.run(scenario())


def test_a_job_can_be_cancelled_while_its_suspects_run(tmp_path):
    async def scenario():
        async def script(engine, body):
            if engine is source.engines[0] and len(engine.in_flight) == 20:
                engine.kill()
            await asyncio.Event().wait()

        source = ScriptedSource(script)
        async with service_in(tmp_path, source) as service:
            first = await create(service, lines(20))
            while len(source.engines) < 2 or not source.engines[1].in_flight:
                await asyncio.sleep(0.001)
            await service.cancel_batch(first.id)
            done = await until(service, first.id)
            assert (done.status, len(await result_lines(service, done.error_file_id))) == ("cancelled", 20)
            assert await service._store.read(lambda db: suspects_of_job(db, 1)) == []
            assert len(service._dispatcher.partial_outputs) == 0
            source._script = killed_by()
            source.engines[-1]._script = killed_by()
            assert (await until(service, (await create(service, lines(2))).id)).status == "completed"

    asyncio.run(scenario())


def test_an_engine_that_is_replaced_while_idle_leaves_no_suspects(tmp_path):
    async def scenario():
        source = ScriptedSource(killed_by())
        async with service_in(tmp_path, source) as service:
            assert (await until(service, (await create(service, lines(2))).id)).status == "completed"
            source.engines[-1].kill()
            assert (await until(service, (await create(service, lines(2))).id)).status == "completed"
            assert service.snapshot().counters["lines_rerun"] == 0
            assert service.snapshot().counters["engine_deaths"] == 0

    asyncio.run(scenario())


def test_many_jobs_share_one_engine_and_a_line_of_one_harms_no_other(tmp_path):
    async def scenario():
        source = ScriptedSource(killed_by("poison"))
        async with service_in(tmp_path, source, max_in_flight=64) as service:
            good = [await create(service, lines(200)) for _ in range(3)]
            bad = await create(service, [*lines(5), line("poison")])
            for batch in good:
                assert (await until(service, batch.id)).request_counts["completed"] == 200
            assert (await until(service, bad.id)).request_counts == {"total": 6, "completed": 5, "failed": 1}

    asyncio.run(scenario())
