"""A full or failing disk: committed lines are kept, no line starts, and the service goes on when the disk works."""

from __future__ import annotations

import asyncio
import shutil

import pytest
from running_service import content, create, line, lines, request, result_lines, service_in, until, upload
from scripted_engines import LineResponse, ScriptedSource

from sgl_batch.errors import RequestError
from sgl_batch.jobs import failpoints
from sgl_batch.jobs.failpoints import failpoint_names, parse_failpoint

ON_THE_WAY = [name for name in failpoint_names() if name.partition(".")[0] in ("committer", "database", "finalizer")]


@pytest.fixture
def arm(monkeypatch):
    """Arm a failpoint of this process."""

    def arm(text):
        monkeypatch.setattr(failpoints, "_armed", parse_failpoint(text))

    return arm


@pytest.mark.parametrize("fault", ["enospc", "eio"])
@pytest.mark.parametrize("name", ON_THE_WAY)
@pytest.mark.parametrize("count", [1, 3])
def test_a_write_that_fails_once_is_tried_again_and_loses_nothing(tmp_path, arm, name, fault, count):
    async def scenario():
        async with service_in(tmp_path, max_in_flight=8) as service:
            file_id = await upload(service, [*lines(60), line("bad", n=0)])
            batch = await service.create_batch(request(file_id))
            arm(f"{name}={fault}:{count}")
            done = await until(service, batch.id)
            assert (done.status, done.request_counts) == ("completed", {"total": 61, "completed": 60, "failed": 1})
            ids = [one["custom_id"] for one in await result_lines(service, done.output_file_id)]
            assert ids == [f"r{index}" for index in range(60)]
            assert service.snapshot().counters["storage_failures"] == (count == 1 or not name.startswith("finalizer"))
            assert service.storage.ok

    asyncio.run(scenario())


def test_a_full_disk_stops_admission_keeps_what_is_committed_and_goes_on_with_room(small_disk):
    answer = LineResponse(status_code=200, request_id="r", body={"choices": [{"text": "x" * 20_000}]})

    async def long_answers(engine, body):
        await asyncio.sleep(0)
        return answer

    async def scenario():
        source = ScriptedSource(long_answers)
        async with service_in(small_disk, source, max_in_flight=16) as service:
            batch = await create(service, lines(150))
            ballast = small_disk / "ballast"
            ballast.write_bytes(b"x" * (shutil.disk_usage(small_disk).free - 1_000_000))
            while service.storage.ok:
                await asyncio.sleep(0.001)
            stopped_at = len(source.current().prompts)
            state = service.storage
            assert "No space left" in state.message or "disk is full" in state.message
            assert (await service.get_batch(batch.id)).x_sgl_batch["storage"]["ok"] is False
            with pytest.raises(RequestError, match="Make room") as error:
                await upload(service, b"x" * 2_000_000)
            assert error.value.status_code == 507
            await asyncio.sleep(0.05)
            assert len(source.current().prompts) == stopped_at < 150
            committed = (await service.get_batch(batch.id)).request_counts["completed"]
            assert stopped_at - 16 <= committed < stopped_at
            running = (await service.get_batch(batch.id)).x_sgl_batch["output_file_id"]
            assert len((await content(service, running)).splitlines()) <= committed
            ballast.unlink()
            done = await until(service, batch.id)
            assert (done.status, done.request_counts["completed"]) == ("completed", 150)
            assert len(await result_lines(service, done.output_file_id)) == 150
            assert service.storage.ok
            assert len(source.current().prompts) == 150

    asyncio.run(scenario())


def test_a_request_that_the_disk_does_not_take_is_refused_and_can_be_sent_again(tmp_path, arm):
    async def scenario():
        async with service_in(tmp_path) as service:
            arm("database.before_commit=eio")
            with pytest.raises(RequestError, match="send the request again") as error:
                await upload(service, lines(1))
            assert error.value.status_code == 507
            file_id = await upload(service, lines(1))
            # The worst moment: the job is written, and the write raises.
            arm("database.committed=eio")
            with pytest.raises(RequestError, match="send the request again"):
                await service.create_batch(request(file_id), idempotency_key="k")
            batch = await service.create_batch(request(file_id), idempotency_key="k")
            assert (await until(service, batch.id)).status == "completed"
            assert len((await service.list_batches()).data) == 1

    asyncio.run(scenario())
