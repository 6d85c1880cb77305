"""Files of users and of jobs: uploads, listings, deletion and expiry."""

from __future__ import annotations

import asyncio

import pytest
from running_service import Clock, content, create, lines, request, service_in, until, upload
from scripted_engines import ScriptedSource

from sgl_batch.errors import RequestError
from sgl_batch.jobs.batch_service.batch_request import parse_batch_request
from sgl_batch.jobs.batch_service.retention import remove_expired


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_an_upload_is_a_file_with_the_very_bytes(tmp_path):
    async def scenario():
        async with service_in(tmp_path, clock=Clock()) as service:
            data = bytes(range(256)) * 20_000
            file_id = await upload(service, data, filename="../../etc/passwd\ud800")
            shown = (await service.get_file(file_id)).to_openai()
            assert shown == {
                "object": "file",
                "id": file_id,
                "bytes": len(data),
                "created_at": 1_700_000_000,
                "filename": "../../etc/passwd?",
                "purpose": "batch",
                "status": "processed",
                "expires_at": None,
                "status_details": None,
            }
            assert await content(service, file_id) == data
            assert names(tmp_path / "jobs" / "files") == [file_id]

    asyncio.run(scenario())


def test_an_upload_beyond_the_limit_is_refused_as_it_comes_and_leaves_nothing(tmp_path):
    async def scenario():
        async with service_in(tmp_path, max_file_bytes=2 << 20) as service:
            with pytest.raises(RequestError, match="more than 2,097,152 bytes") as error:
                await upload(service, b"x" * ((2 << 20) + 1))
            assert (error.value.status_code, error.value.code) == (413, "file_too_large")
            await upload(service, b"x" * (2 << 20))
            assert names(tmp_path / "jobs" / "partial") == []

    asyncio.run(scenario())


@pytest.mark.parametrize(
    "finish",
    [
        {"purpose": "fine-tune"},
        {"expires_after": {"anchor": "created_at", "seconds": "3599"}},
        {"expires_after": {"anchor": "created_at", "seconds": 2_592_001}},
        {"expires_after": {"anchor": "last_active_at", "seconds": 3600}},
        {"expires_after": {"seconds": 3600}},
    ],
)
def test_an_upload_with_a_wrong_field_is_refused_and_leaves_nothing(tmp_path, finish):
    async def scenario():
        async with service_in(tmp_path) as service:
            with pytest.raises(RequestError, match=r"purpose|expires_after"):
                await upload(service, lines(1), **finish)
            assert (await service.list_files()).data == ()
            assert names(tmp_path / "jobs" / "partial") == names(tmp_path / "jobs" / "files") == []

    asyncio.run(scenario())


def test_files_are_listed_page_by_page_in_either_order(tmp_path):
    async def scenario():
        async with service_in(tmp_path) as service:
            ids = [await upload(service, lines(1)) for _ in range(4)]
            done = await until(service, (await service.create_batch(request(ids[0]))).id)
            page = await service.list_files(limit=3)
            assert ([one.id for one in page.data], page.has_more) == ([done.output_file_id, *ids[:1:-1]], True)
            page = await service.list_files(limit=3, after=ids[2])
            assert ([one.id for one in page.data], page.has_more) == (ids[1::-1], False)
            page = await service.list_files(purpose="batch", order="asc", after=ids[1])
            assert [one.id for one in page.data] == ids[2:]
            page = await service.list_files(purpose="batch_output")
            assert [one.id for one in page.data] == [done.output_file_id]
            for wrong in ({"limit": 0}, {"limit": 10_001}, {"order": "up"}, {"after": "file-" + "0" * 24}):
                with pytest.raises(RequestError, match=r"give|there is no"):
                    await service.list_files(**wrong)

    asyncio.run(scenario())


def test_a_file_that_a_job_needs_is_not_deleted_until_the_job_has_ended(tmp_path):
    async def scenario():
        source = ScriptedSource(is_up=False)
        async with service_in(tmp_path, source) as service:
            file_id = await upload(service, lines(3))
            batch = await service.create_batch(request(file_id))
            with pytest.raises(RequestError, match=f"needed by job {batch.id}") as error:
                await service.delete_file(file_id)
            assert (error.value.status_code, error.value.code) == (409, "file_in_use")
            source.start()
            done = await until(service, batch.id)
            await service.delete_file(file_id)
            with pytest.raises(RequestError, match="there is no file"):
                await service.get_file(file_id)
            assert len((await content(service, done.output_file_id)).splitlines()) == 3
            assert names(tmp_path / "jobs" / "files") == [done.output_file_id]

    asyncio.run(scenario())


def test_a_file_can_be_read_to_its_end_though_it_is_deleted_meanwhile(tmp_path):
    async def scenario():
        async with service_in(tmp_path) as service:
            file_id = await upload(service, b"x" * 1_000_000)
            opened = await service.open_content(file_id)
            await service.delete_file(file_id)
            assert sum([len(chunk) async for chunk in opened.chunks]) == 1_000_000

    asyncio.run(scenario())


def test_files_are_removed_when_their_time_is_over_but_not_under_a_job(tmp_path):
    async def scenario():
        clock = Clock()
        source = ScriptedSource(is_up=False)
        async with service_in(tmp_path, source, clock=clock) as service:
            expiry = {"anchor": "created_at", "seconds": 3600}
            used, _unused = [await upload(service, lines(2), expires_after=expiry) for _ in range(2)]
            kept = await upload(service, lines(2))
            batch = await service.create_batch(request(used, output_expires_after=expiry))
            clock.now += 3600
            while len((await service.list_files()).data) == 3:
                await asyncio.sleep(0.005)
            assert {one.id for one in (await service.list_files()).data} == {used, kept}
            source.start()
            done = await until(service, batch.id)
            assert (await service.get_file(done.output_file_id)).expires_at == int(clock.now) + 3600
            assert await remove_expired(service._store, clock.now) == 1
            clock.now += 3600
            async with asyncio.timeout(60):  # a file goes after its row
                while names(tmp_path / "jobs" / "files") != [kept]:
                    await asyncio.sleep(0.005)
            assert [one.id for one in (await service.list_files()).data] == [kept]

    asyncio.run(scenario())


def test_what_a_crash_left_is_removed_at_the_next_start(tmp_path):
    async def scenario():
        async with service_in(tmp_path) as service:
            kept = await upload(service, lines(1))
        for leftover in (f"files/file-{'0' * 24}", "partial/x", "scratch/y", f"segments/batch_{'0' * 24}"):
            (tmp_path / "jobs" / leftover).write_bytes(b"x")
        async with service_in(tmp_path):
            pass
        assert [names(tmp_path / "jobs" / folder) for folder in ("files", "partial", "scratch", "segments")] == [
            [kept],
            [],
            [],
            [],
        ]

    asyncio.run(scenario())


def test_a_job_of_a_wrong_file_is_refused(tmp_path):
    async def scenario():
        async with service_in(tmp_path) as service:
            done = await until(service, (await create(service, lines(1))).id)
            with pytest.raises(RequestError, match="has the purpose batch_output"):
                await service.create_batch(request(done.output_file_id))

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({"endpoint": None}, "missing_required_parameter", "endpoint"),
        ({"endpoint": "/v1/embeddings"}, "invalid_endpoint", "endpoint"),
        ({"endpoint": 3}, "invalid_type", "endpoint"),
        ({"completion_window": "1s"}, "invalid_completion_window", "completion_window"),
        ({"completion_window": None}, "missing_required_parameter", "completion_window"),
        ({"input_file_id": None}, "missing_required_parameter", "input_file_id"),
        ({"metadata": {"priority": "0"}}, "invalid_priority", "metadata"),
        ({"metadata": {str(key): "x" for key in range(17)}}, "invalid_metadata", "metadata"),
        ({"metadata": {"k" * 65: "x"}}, "invalid_metadata", "metadata"),
        ({"metadata": {"k": "x" * 513}}, "invalid_metadata", "metadata"),
        ({"metadata": {"k": 1}}, "invalid_metadata", "metadata"),
        ({"metadata": []}, "invalid_metadata", "metadata"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": True}}, "invalid_expiry", "output_expires_after"),
        ({"continue_form": "batch_1"}, "unknown_parameter", "continue_form"),
    ],
)
def test_a_request_with_a_wrong_field_is_refused_and_the_field_is_named(fields, code, param):
    with pytest.raises(RequestError, match=param) as error:
        parse_batch_request({**request("file-1"), **fields})
    assert (error.value.code, error.value.param, error.value.status_code) == (code, param, 400)


@pytest.mark.parametrize(
    ("field", "hint"),
    [
        ("priority", "use metadata.priority, as in"),
        ("Priority", "use metadata.priority, as in"),
        ("name", "use metadata.name, as in"),
        ("idempotency-key", "use the header Idempotency-Key"),
        ("completion-window", "use completion_window"),
        ("completion_windows", "use completion_window"),
        ("window", "use completion_window"),
        ("input_file", "use input_file_id"),
        ("model", 'use "model" in the body of each request line'),
        ("xyz", "there are input_file_id, endpoint, completion_window, metadata, output_expires_after, continue_from"),
    ],
)
def test_an_unknown_field_is_refused_with_a_suggestion(field: str, hint: str) -> None:
    with pytest.raises(RequestError, match=f'there is no field "{field}"; ') as caught:
        parse_batch_request({**request("file-1"), field: "5"})
    assert hint in caught.value.message
    assert (caught.value.status_code, caught.value.param) == (400, field)
