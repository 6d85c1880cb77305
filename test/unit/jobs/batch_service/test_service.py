"""The service from upload to output, with engines that answer by script."""

from __future__ import annotations

import asyncio
import json

import pytest
from running_service import (
    Clock,
    content,
    create,
    line,
    lines,
    request,
    result_lines,
    service_in,
    until,
    upload,
)
from scripted_engines import LineResponse, ScriptedSource, answer, hold_marked

from sgl_batch.errors import ConfigError, RequestError
from sgl_batch.jobs.seeds import line_seed


def test_a_job_ends_with_one_result_line_for_each_line_in_input_order(tmp_path):
    async def scenario():
        async with service_in(tmp_path) as service:
            batch = await create(service, lines(3000))
            done = await until(service, batch.id)
            assert done.status == "completed"
            assert done.request_counts == {"total": 3000, "completed": 3000, "failed": 0}
            assert (done.model, done.error_file_id) == ("tiny", None)
            found = await result_lines(service, done.output_file_id)
            assert [one["custom_id"] for one in found] == [f"r{index}" for index in range(3000)]
            seed = done.x_sgl_batch["seed"]
            for index in (0, 1, 2999):
                body = {**lines(3000)[index]["body"], "seed": line_seed(seed, index)}
                assert found[index]["response"]["body"] == answer(body).body
            assert done.usage == {
                "input_tokens": 21_000,
                "output_tokens": 15_000,
                "total_tokens": 36_000,
                "input_tokens_details": {"cached_tokens": 6000},
                "output_tokens_details": {"reasoning_tokens": 3000},
            }

    asyncio.run(scenario())


def test_what_the_endpoint_refuses_is_that_lines_own_error(tmp_path):
    given = [
        line("good"),
        line("refused by the engine", "refuse"),
        line("refused before it", "x", max_tokens=0),
        line("no model", "x", model=None),
        line("crash", "fault"),
        line("good too"),
    ]

    async def scenario():
        async with service_in(tmp_path, ScriptedSource(hold_marked)) as service:
            done = await until(service, (await create(service, given)).id)
            assert done.status == "completed"
            assert done.request_counts == {"total": 6, "completed": 2, "failed": 4}
            assert [one["custom_id"] for one in await result_lines(service, done.output_file_id)] == [
                "good",
                "good too",
            ]
            errors = await result_lines(service, done.error_file_id)
            assert [(one["custom_id"], one["response"]["body"]["error"]["code"]) for one in errors] == [
                ("refused by the engine", "context_length_exceeded"),
                ("refused before it", "invalid_max_tokens"),
                ("no model", "missing_model"),
                ("crash", "internal_error"),
            ]
            assert [one["error"] for one in errors] == [None] * 4

    asyncio.run(scenario())


def test_a_job_with_bad_lines_fails_as_a_whole_and_runs_none(tmp_path):
    async def scenario():
        source = ScriptedSource()
        async with service_in(tmp_path, source) as service:
            done = await until(service, (await create(service, b'{"custom_id": 1}\nnot json\n')).id)
            assert done.status == "failed"
            assert done.errors == {
                "object": "list",
                "data": [
                    {
                        "code": "missing_custom_id",
                        "line": 1,
                        "param": "custom_id",
                        "message": done.errors["data"][0]["message"],
                    },
                    {
                        "code": "invalid_json_line",
                        "line": 2,
                        "param": None,
                        "message": done.errors["data"][1]["message"],
                    },
                ],
            }
            assert (done.output_file_id, done.error_file_id) == (None, None)
            assert source.current().prompts == []

    asyncio.run(scenario())


def test_an_answer_that_is_not_json_fails_only_its_line(tmp_path):
    async def deep(engine, body):
        if body["prompt"] != "deep":
            return None
        nested = []
        for _ in range(100_000):
            nested = [nested]
        return LineResponse(status_code=200, request_id="r", body={"choices": nested})

    async def scenario():
        async with service_in(tmp_path, ScriptedSource(deep)) as service:
            done = await until(service, (await create(service, [line("a"), line("b", "deep"), line("c")])).id)
            assert done.request_counts == {"total": 3, "completed": 2, "failed": 1}
            (error,) = await result_lines(service, done.error_file_id)
            assert error["response"]["body"]["error"]["code"] == "internal_error"

    asyncio.run(scenario())


def test_a_cancelled_job_keeps_its_finished_lines_and_says_so_for_the_others(tmp_path):
    async def scenario():
        given = [line("a"), line("b", "hold"), line("c"), line("d", "refuse")]
        may_end = asyncio.Event()

        async def end_late(engine, body):
            try:
                return await hold_marked(engine, body)
            finally:
                if body["prompt"] == "hold":
                    await may_end.wait()

        async with service_in(tmp_path, ScriptedSource(end_late)) as service:
            batch = await create(service, given)
            while sum((await service.get_batch(batch.id)).request_counts.values()) < 4 + 3:
                await asyncio.sleep(0.001)
            cancelling = await service.cancel_batch(batch.id)
            assert cancelling.status == "cancelling"
            assert (await service.cancel_batch(batch.id)).cancelling_at == cancelling.cancelling_at
            may_end.set()
            done = await until(service, batch.id)
            assert done.status == "cancelled"
            assert done.request_counts == {"total": 4, "completed": 2, "failed": 1}
            assert [one["custom_id"] for one in await result_lines(service, done.output_file_id)] == ["a", "c"]
            unanswered, refused = await result_lines(service, done.error_file_id)
            assert (unanswered["custom_id"], unanswered["response"]) == ("b", None)
            assert unanswered["error"]["code"] == "batch_cancelled"
            assert (refused["custom_id"], refused["error"]) == ("d", None)
            with pytest.raises(RequestError, match="cannot be cancelled") as error:
                await service.cancel_batch(batch.id)
            assert (error.value.status_code, error.value.code) == (409, "batch_not_cancellable")
            assert service.snapshot().in_flight == 0

    asyncio.run(scenario())


def test_a_job_shows_its_priority_and_its_name_or_that_of_its_input(tmp_path):
    async def scenario():
        async with service_in(tmp_path) as service:
            plain = await create(service, lines(1))
            named = await create(service, lines(1), metadata={"name": "nightly", "priority": "20"})
            shown = [(one.x_sgl_batch["name"], one.x_sgl_batch["priority"]) for one in (plain, named)]
            assert shown == [("in.jsonl", 1), ("nightly", 20)]
            done = await until(service, plain.id)
            await service.delete_file(done.input_file_id)
            assert (await service.get_batch(plain.id)).x_sgl_batch["name"] is None
            assert (await service.list_batches()).data[0].x_sgl_batch["name"] == "nightly"

    asyncio.run(scenario())


def test_a_job_can_be_cancelled_before_any_engine_is_there(tmp_path):
    async def scenario():
        async with service_in(tmp_path, ScriptedSource(is_up=False)) as service:
            batch = await create(service, lines(2))
            assert batch.status == "validating"
            assert batch.x_sgl_batch["engine"] == "absent"
            await service.cancel_batch(batch.id)
            done = await until(service, batch.id)
            assert (done.status, done.output_file_id, done.error_file_id) == ("cancelled", None, None)

    asyncio.run(scenario())


def test_jobs_wait_for_an_engine_and_run_when_it_comes(tmp_path):
    async def scenario():
        source = ScriptedSource(is_up=False)
        async with service_in(tmp_path, source) as service:
            batch = await create(service, lines(2))
            source.start()
            assert (await until(service, batch.id)).status == "completed"

    asyncio.run(scenario())


def test_an_expired_job_keeps_its_finished_lines_and_says_so_for_the_others(tmp_path):
    async def scenario():
        clock = Clock()
        given = [line("a"), line("b", "hold"), line("c")]
        async with service_in(tmp_path, ScriptedSource(hold_marked), clock=clock) as service:
            batch = await create(service, given, completion_window="2h")
            assert batch.expires_at == batch.created_at + 7200
            while (await service.get_batch(batch.id)).request_counts["completed"] < 2:
                await asyncio.sleep(0.001)
            clock.now += 7199
            await asyncio.sleep(0.05)
            assert (await service.get_batch(batch.id)).status == "in_progress"
            clock.now += 1
            done = await until(service, batch.id)
            assert (done.status, done.expired_at) == ("expired", done.expires_at)
            assert [one["custom_id"] for one in await result_lines(service, done.output_file_id)] == ["a", "c"]
            (unanswered,) = await result_lines(service, done.error_file_id)
            assert (unanswered["custom_id"], unanswered["error"]["code"]) == ("b", "batch_expired")

    asyncio.run(scenario())


def test_a_job_that_no_engine_validated_in_time_expires(tmp_path):
    async def scenario():
        clock = Clock()
        async with service_in(tmp_path, ScriptedSource(is_up=False), clock=clock) as service:
            batch = await create(service, lines(1), completion_window="1m")
            clock.now += 60
            assert (await until(service, batch.id)).status == "expired"

    asyncio.run(scenario())


def test_while_a_job_runs_its_content_is_the_lines_before_the_first_unfinished_one(tmp_path):
    async def scenario():
        given = [line("a"), line("b", "refuse"), line("c"), line("d", "hold"), line("e")]
        async with service_in(tmp_path, ScriptedSource(hold_marked)) as service:
            batch = await create(service, given)
            while (await service.get_batch(batch.id)).request_counts["completed"] < 3:
                await asyncio.sleep(0.001)
            running = (await service.get_batch(batch.id)).x_sgl_batch
            assert running["contiguous_lines"] == 3
            prefix = await content(service, running["output_file_id"])
            assert [json.loads(one)["custom_id"] for one in prefix.splitlines()] == ["a", "c"]
            assert [one["custom_id"] for one in await result_lines(service, running["error_file_id"])] == ["b"]
            shown = await service.get_file(running["output_file_id"])
            assert (shown.bytes, shown.status, shown.purpose) == (len(prefix), "uploaded", "batch_output")
            with pytest.raises(RequestError, match="needed by job") as error:
                await service.delete_file(running["output_file_id"])
            assert error.value.status_code == 409
            await service.cancel_batch(batch.id)
            done = await until(service, batch.id)
            assert done.output_file_id == running["output_file_id"]
            assert (await content(service, done.output_file_id)).startswith(prefix)
            assert (await service.get_file(done.output_file_id)).status == "processed"

    asyncio.run(scenario())


def test_a_running_job_names_its_files_from_the_first_line_on_that_is_committed_to_each(tmp_path):
    async def scenario():
        async with service_in(tmp_path, ScriptedSource(hold_marked)) as service:
            waits = await create(service, [line("a", "hold")])
            answers = await create(service, [line("a"), line("b", "hold")])
            refuses = await create(service, [line("a", "refuse"), line("b", "hold")])
            while not (shown := await service.get_batch(answers.id)).request_counts["completed"]:
                assert shown.output_file_id is None
                await asyncio.sleep(0.001)
            while not (await service.get_batch(refuses.id)).request_counts["failed"]:
                await asyncio.sleep(0.001)
            shown = [await service.get_batch(one.id) for one in (waits, answers, refuses)]
            assert {one.status for one in shown} == {"in_progress"}
            named = [(one.output_file_id is not None, one.error_file_id is not None) for one in shown]
            assert named == [(False, False), (True, False), (False, True)]
            assert [one["custom_id"] for one in await result_lines(service, shown[1].output_file_id)] == ["a"]
            assert (await service.get_file(shown[2].error_file_id)).bytes > 0
            for one in shown:
                await service.cancel_batch(one.id)
                done = await until(service, one.id)
                assert (done.output_file_id or one.output_file_id) == one.output_file_id, "a name stays"

    asyncio.run(scenario())


def test_a_service_that_is_stopped_goes_on_where_it_was(tmp_path):
    async def scenario():
        given = [line(f"r{index}", "hold" if index % 3 == 0 else None) for index in range(2500)]
        async with service_in(tmp_path, ScriptedSource(hold_marked)) as service:
            batch = await create(service, given)
            while (await service.get_batch(batch.id)).request_counts["completed"] < 600:
                await asyncio.sleep(0.001)
        source = ScriptedSource()
        async with service_in(tmp_path, source) as service:
            done = await until(service, batch.id)
            assert (done.status, done.request_counts["completed"]) == ("completed", 2500)
            assert 2500 / 3 < len(source.current().prompts) <= 1900
            ids = [one["custom_id"] for one in await result_lines(service, done.output_file_id)]
            assert ids == [one["custom_id"] for one in given]

    asyncio.run(scenario())


def test_the_same_key_gives_the_same_job_and_for_another_request_a_conflict(tmp_path):
    async def scenario():
        async with service_in(tmp_path) as service:
            body = request(await upload(service, lines(1)))
            first = await service.create_batch(body, idempotency_key="k")
            assert (await service.create_batch(dict(reversed(body.items())), idempotency_key="k")).id == first.id
            assert (await service.create_batch(body, idempotency_key="other")).id != first.id
            assert (await service.create_batch(body)).id != first.id
            with pytest.raises(RequestError, match="was used for another request") as error:
                await service.create_batch({**body, "completion_window": "1h"}, idempotency_key="k")
            assert (error.value.status_code, error.value.code) == (409, "idempotency_key_reused")
            assert len((await service.list_batches()).data) == 3

    asyncio.run(scenario())


def test_a_job_that_continues_another_runs_only_what_has_no_success_yet(tmp_path):
    async def scenario():
        given = [line("a"), line("b", "hold"), line("c", "refuse"), *lines(1500)]
        async with service_in(tmp_path, ScriptedSource(hold_marked)) as service:
            first = await create(service, given, metadata={"priority": "2"})
            with pytest.raises(RequestError, match="cancel it first"):
                await service.create_batch({"continue_from": first.id})
            while (await service.get_batch(first.id)).request_counts["completed"] < 1501:
                await asyncio.sleep(0.001)
            await service.cancel_batch(first.id)
            first = await until(service, first.id)
        source = ScriptedSource()
        async with service_in(tmp_path, source) as service:
            second = await service.create_batch({"continue_from": first.id})
            done = await until(service, second.id)
            assert (done.status, done.request_counts) == ("completed", {"total": 1503, "completed": 1503, "failed": 0})
            assert (done.endpoint, done.input_file_id) == (first.endpoint, first.input_file_id)
            assert source.current().prompts == ["hold", "refuse"]
            found = await result_lines(service, done.output_file_id)
            assert [one["custom_id"] for one in found] == [one["custom_id"] for one in given]
            taken = {one["custom_id"]: one for one in await result_lines(service, first.output_file_id)}
            assert taken == {one["custom_id"]: one for one in found if one["custom_id"] in taken}
            assert done.usage["input_tokens"] == 7 * 1503
            await service.delete_file(first.output_file_id)
            with pytest.raises(RequestError, match="was deleted or has expired") as error:
                await service.create_batch({"continue_from": first.id})
            assert (error.value.status_code, error.value.code) == (409, "output_file_gone")

    asyncio.run(scenario())


def test_jobs_are_listed_newest_first_page_by_page(tmp_path):
    async def scenario():
        async with service_in(tmp_path) as service:
            file_id = await upload(service, lines(1))
            ids = [(await service.create_batch(request(file_id))).id for _ in range(5)]
            found, after = [], None
            while True:
                page = (await service.list_batches(limit=2, after=after)).to_openai()
                assert page["first_id"] == page["data"][0]["id"]
                found += [one["id"] for one in page["data"]]
                after = page["last_id"]
                if not page["has_more"]:
                    break
            assert found == ids[::-1]
            for limit in (0, 101):
                with pytest.raises(RequestError, match="give 1 to 100"):
                    await service.list_batches(limit=limit)

    asyncio.run(scenario())


def test_unknown_ids_are_not_found(tmp_path):
    async def scenario():
        async with service_in(tmp_path) as service:
            for one_id in ("batch_" + "0" * 24, "../../etc/passwd", "file-\ud800", ""):
                for ask in (service.get_batch, service.cancel_batch, service.get_file, service.open_content):
                    with pytest.raises(RequestError, match="there is no") as error:
                        await ask(one_id)
                    assert error.value.status_code == 404
                with pytest.raises(RequestError, match="there is no"):
                    await service.delete_file(one_id)
                with pytest.raises(RequestError, match="there is no"):
                    await service.create_batch(request(one_id))
                with pytest.raises(RequestError, match="there is no"):
                    await service.create_batch({"continue_from": one_id})

    asyncio.run(scenario())


def test_one_directory_has_one_server(tmp_path):
    async def scenario():
        async with service_in(tmp_path):
            with pytest.raises(ConfigError, match="held by another server"):
                async with service_in(tmp_path):
                    pass
        async with service_in(tmp_path):
            pass

    asyncio.run(scenario())


def test_a_running_job_shows_its_progress_and_rate(tmp_path):
    async def scenario():
        clock = Clock()
        given = [*lines(30), line("h", "hold")]
        async with service_in(tmp_path, ScriptedSource(hold_marked), clock=clock) as service:
            batch = await create(service, given, completion_window="1h")
            while (await service.get_batch(batch.id)).request_counts["completed"] < 30:
                await asyncio.sleep(0.001)
            clock.now += 30
            shown = (await service.get_batch(batch.id)).x_sgl_batch
            assert (shown["percent"], shown["in_flight"], shown["engine"]) == (96.77, 1, "ready")
            assert (shown["lines_per_s"], shown["tokens_out_per_s"]) == (1.0, 5.0)
            assert (shown["eta_s"], shown["expected_completion_at"]) == (1.0, int(clock.now) + 1)
            assert (shown["window_at_risk"], shown["storage"]["ok"]) == (False, True)
            assert shown["judged_by"] == "rate"
            snapshot = service.snapshot()
            assert (snapshot.in_flight, snapshot.jobs_by_status, snapshot.engine_ready) == (1, {"in_progress": 1}, True)
            assert (snapshot.counters["lines_completed"], snapshot.finished_s_ago) == (30, 30.0)
            assert [one.id for one in snapshot.jobs] == [batch.id]
            clock.now += 3560
            shown = (await service.get_batch(batch.id)).x_sgl_batch
            assert shown["window_at_risk"]
            assert "after the end of its window" in shown["window_text"]

    asyncio.run(scenario())


def test_a_window_is_met_among_jobs_of_high_priority_and_takes_no_more_of_the_engine_than_it_needs(tmp_path):
    async def scenario():
        clock, order, one_at_a_time = Clock(), [], asyncio.Lock()
        all_here, has_measured = asyncio.Event(), asyncio.Event()

        async def take_a_tenth_of_a_second(engine, body):
            await all_here.wait()
            async with one_at_a_time:
                clock.now += 0.1
                order.append((clock.now, body["prompt"][0]))
                if len(order) == 300:
                    has_measured.set()
                    all_here.clear()
                if len(order) > 300:
                    await lines_are_read(engine)

        async def lines_are_read(engine):
            # They are read in real time: the clock must not run away from that.
            for _ in range(20):
                await asyncio.sleep(0.001)
                begun = sum(prompt.startswith("w") for prompt in engine.prompts)
                if begun == 250 or any(prompt.startswith("w") for prompt in engine.in_flight):
                    break

        async def run(name, number, **fields):
            given = [line(f"{name}{index}", f"{name}{index}") for index in range(number)]
            batch = await create(service, given, **fields)
            await until(service, batch.id, "in_progress")
            return batch

        source = ScriptedSource(take_a_tenth_of_a_second)
        async with service_in(tmp_path, source, clock=clock, max_in_flight=16) as service:
            for name, priority in (("a", "20"), ("b", "5")):
                await run(name, 1200, metadata={"priority": priority})
            all_here.set()
            await has_measured.wait()
            before = [name for _, name in order]
            short = await run("w", 250, completion_window="1m")
            all_here.set()
            done = await until(service, short.id)
            assert (done.status, done.request_counts["completed"]) == ("completed", 250)
        meanwhile = [name for now, name in order[300:] if now < done.completed_at]
        assert meanwhile.count("a") + meanwhile.count("b") > 0.25 * len(meanwhile), "the others go on"
        for part in (before[20:], meanwhile):  # 4, but for moments in which lines are being read
            assert 2.5 < part.count("a") / part.count("b") < 6

    asyncio.run(scenario())


def test_no_more_lines_and_bytes_are_in_flight_than_allowed(tmp_path):
    async def most_in_flight(directory, **limits):
        most = 0

        async def watch(engine, body):
            nonlocal most
            most = max(most, len(engine.in_flight))
            await asyncio.sleep(0)

        async with service_in(directory, ScriptedSource(watch), **limits) as service:
            assert (await until(service, (await create(service, lines(200))).id)).status == "completed"
        return most

    assert asyncio.run(most_in_flight(tmp_path / "lines", max_in_flight=7)) == 7
    # A line has about 100 bytes; the one that reaches the limit is let in whole.
    assert 2 <= asyncio.run(most_in_flight(tmp_path / "bytes", max_in_flight_bytes=250)) <= 3
