"""A program with the batch service and a client of it. It is killed and started again until it prints `done`.

`python crashing_client.py DIRECTORY SCALE`, where SCALE is how large its jobs are. The client's own state (ids of its
files) lies in DIRECTORY/client, so that after a crash it goes on as a real one would: it uploads again what it has no
id of, and creates its jobs with the same keys. Its engine answers by the request alone, refuses one prompt, and dies
of another.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from running_service import content, line, request, service_in, until, upload
from scripted_engines import LineResponse, ScriptedEngine, ScriptedSource, refusal

from sgl_batch.errors import RequestError
from sgl_batch.jobs.batch_service.objects import BatchObject
from sgl_batch.jobs.batch_service.service import BatchService


def first_lines(scale: int) -> list[dict[str, Any]]:
    """A job with one line that kills engines, and two that fail otherwise."""
    return [
        *(line(f"a{index}") for index in range(30 * scale)),
        line("poison"),
        line("refuse"),
        line("bad", temperature=1.0, n=-1),
        *(line(f"b{index}") for index in range(30 * scale)),
    ]


def second_lines(scale: int) -> list[dict[str, Any]]:
    """A job in which every fifth line has no answer until the job is cancelled."""
    return [line(f"c{index}", "hold" if index % 5 == 4 else f"c{index}") for index in range(60 * scale)]


class Client:
    """Does each step once, across crashes."""

    def __init__(self, directory: Path, scale: int, service: BatchService) -> None:
        self._directory = directory
        self._scale = scale
        self._service = service
        directory.mkdir(exist_ok=True)

    async def run(self) -> None:
        first = await self._job("first", first_lines(self._scale))
        await self._save(await until(self._service, first.id))
        second = await self._job("second", second_lines(self._scale))
        while second.status in ("validating", "in_progress"):
            second = await self._service.get_batch(second.id)
            if sum(second.request_counts[key] for key in ("completed", "failed")) >= 48 * self._scale:
                second = await self._service.cancel_batch(second.id)
            await asyncio.sleep(0.002)
        second = await until(self._service, second.id)
        await self._save(second)
        (self._directory / "let_go").touch()
        third = await self._service.create_batch({"continue_from": second.id}, idempotency_key="third")
        await self._save(await until(self._service, third.id))
        try:
            await self._service.delete_file(first.input_file_id)
        except RequestError as error:
            if error.status_code != 404:  # it was deleted before a crash
                raise

    async def _job(self, name: str, lines: list[dict[str, object]]) -> BatchObject:
        known = self._directory / f"{name}_file"
        if not known.exists():
            file_id = await upload(self._service, lines)
            known.with_suffix(".new").write_text(file_id)
            known.with_suffix(".new").rename(known)
        return await self._service.create_batch(request(known.read_text()), idempotency_key=name)

    async def _save(self, batch: BatchObject) -> None:
        """Write the job's output, errors and seed to files, for checks afterwards."""
        for kind, file_id in (("output", batch.output_file_id), ("errors", batch.error_file_id)):
            (self._directory / f"{batch.id}.{kind}").write_bytes(await content(self._service, file_id))
        (self._directory / f"{batch.id}.seed").write_text(str(batch.x_sgl_batch["seed"]))


async def run(directory: Path, scale: int) -> None:
    """Take the remaining steps."""
    client_directory = directory / "client"

    async def script(engine: ScriptedEngine, body: Mapping[str, object]) -> LineResponse | None:
        await asyncio.sleep(0.001)
        if (client_directory / "let_go").exists():
            with (client_directory / "prompts_at_last").open("a") as prompts:
                prompts.write(f"{body['prompt']}\n")
        match body["prompt"]:
            case "refuse":
                return refusal()
            case "poison":
                engine.kill()
            case "hold":
                while not (client_directory / "let_go").exists():
                    await asyncio.sleep(0.01)
        return None

    async with service_in(directory, ScriptedSource(script)) as service:
        await Client(client_directory, scale, service).run()
        while service.snapshot().jobs or any((directory / "jobs" / "segments").iterdir()):
            await asyncio.sleep(0.001)
    sys.stdout.write("done\n")


if __name__ == "__main__":
    asyncio.run(run(Path(sys.argv[1]), int(sys.argv[2])))
