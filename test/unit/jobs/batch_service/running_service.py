"""Runs a batch service with scripted engines. Owns the steps that its tests share."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from scripted_engines import ScriptedSource

from sgl_batch.jobs.batch_service.objects import BatchObject
from sgl_batch.jobs.batch_service.service import BatchService
from sgl_batch.jobs.batch_service.settings import ServiceSettings

ENDPOINT = "/v1/completions"
ENDED = ("completed", "failed", "cancelled", "expired")


class Clock:
    """Unix seconds that a test moves."""

    def __init__(self) -> None:
        self.now = 1_700_000_000.0

    def __call__(self) -> float:
        return self.now


def line(custom_id: str, prompt: str | None = None, **body: object) -> dict[str, Any]:
    """Return a good request line."""
    return {
        "custom_id": custom_id,
        "method": "POST",
        "url": ENDPOINT,
        "body": {"model": "tiny", "prompt": custom_id if prompt is None else prompt, "max_tokens": 4, **body},
    }


def lines(number: int) -> list[dict[str, Any]]:
    """Return good lines r0, r1, ..."""
    return [line(f"r{index}") for index in range(number)]


@asynccontextmanager
async def service_in(
    directory: Path, source: ScriptedSource | None = None, *, clock: Callable[[], float] | None = None, **settings: Any
) -> AsyncIterator[BatchService]:
    """Give a started service, and stop it at the end."""
    more = {} if clock is None else {"clock": clock}
    given = replace(ServiceSettings(jobs_dir=directory / "jobs"), **settings)
    service = BatchService(given, source or ScriptedSource(), tick_s=0.01, first_retry_s=0.01, **more)
    await service.start()
    try:
        yield service
    finally:
        await service.stop()
        assert service.snapshot().fault is None


async def upload(service: BatchService, content: bytes | Sequence[object], **finish: Any) -> str:
    """Upload lines, or bytes as they are. Return the file's id."""
    if not isinstance(content, bytes):
        content = "".join(json.dumps(one) + "\n" for one in content).encode()
    async with await service.begin_upload() as uploading:
        for start in range(0, len(content), 1000):
            await uploading.write(content[start : start + 1000])
        given = {"filename": "in.jsonl", "purpose": "batch", **finish}
        return (await uploading.finish(**given)).id


async def create(service: BatchService, content: bytes | Sequence[object], **fields: Any) -> BatchObject:
    """Upload lines and make a job of them."""
    return await service.create_batch(request(await upload(service, content), **fields))


def request(input_file_id: str, **fields: Any) -> dict[str, Any]:
    """Return the body of POST /v1/batches."""
    return {"input_file_id": input_file_id, "endpoint": ENDPOINT, "completion_window": "24h", **fields}


async def until(service: BatchService, batch_id: str, *statuses: str) -> BatchObject:
    """Wait until the job has one of these statuses, or has ended."""
    async with asyncio.timeout(60):
        while True:
            batch = await service.get_batch(batch_id)
            if batch.status in (*statuses, *ENDED):
                return batch
            await asyncio.sleep(0.005)


async def content(service: BatchService, file_id: str | None) -> bytes:
    """Return the bytes of a file, or none without a file."""
    if file_id is None:
        return b""
    opened = await service.open_content(file_id)
    data = b"".join([chunk async for chunk in opened.chunks])
    assert len(data) == opened.num_bytes
    return data


async def result_lines(service: BatchService, file_id: str | None) -> list[dict[str, Any]]:
    """Return the result lines of an output or error file."""
    return [json.loads(one) for one in (await content(service, file_id)).splitlines()]
