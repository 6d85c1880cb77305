"""A client of the app over a real service and a real socket, without an engine."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
from served_app import served

from sgl_batch.api.app import make_app
from sgl_batch.api.auth import AccessRules
from sgl_batch.api.pass_through import PassThrough
from sgl_batch.api.supervisor import EngineSupervisor
from sgl_batch.jobs.batch_service.service import BatchService
from sgl_batch.jobs.batch_service.settings import ServiceSettings

LINE = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"model": "tiny", "prompt": "x"}}
MAX_FILE_BYTES = 3 << 20


class Client:
    """The client of one server."""

    def __init__(self, session: aiohttp.ClientSession, url: str, directory: Path) -> None:
        self._session, self.url, self.directory = session, url, directory

    async def ask(self, method: str, path: str, **given: Any) -> tuple[int, Any]:
        async with self._session.request(method, self.url + path, **given) as answer:
            return answer.status, json.loads(await answer.read())

    async def refusal(self, method: str, path: str, status: int, **given: Any) -> dict[str, Any]:
        """The error of a request that must be refused with `status`."""
        answered, body = await self.ask(method, path, **given)
        assert answered == status, body
        assert set(body) == {"error"}
        assert set(body["error"]) == {"message", "type", "param", "code"}
        error: dict[str, Any] = body["error"]
        return error

    async def upload(self, content: bytes | None = None, **fields: str) -> dict[str, Any]:
        content = json.dumps(LINE).encode() + b"\n" if content is None else content
        status, file = await self.ask("POST", "/v1/files", data=form(content, **fields))
        assert status == 200, file
        return dict(file)

    async def create(self, file_id: str, **more: Any) -> tuple[int, Any]:
        headers = {"Idempotency-Key": more.pop("key")} if "key" in more else {}
        body = {"input_file_id": file_id, "endpoint": "/v1/completions", "completion_window": "24h", **more}
        return await self.ask("POST", "/v1/batches", json=body, headers=headers)


def form(content: bytes, filename: str = "in.jsonl", **fields: str) -> aiohttp.FormData:
    made = aiohttp.FormData()
    for name, value in {"purpose": "batch", **fields}.items():
        made.add_field(name.replace("__", "[") + ("]" if "__" in name else ""), value)
    made.add_field("file", content, filename=filename)
    return made


@asynccontextmanager
async def serving(directory: Path, **keys: str) -> AsyncIterator[Client]:
    """Serve the app over a service in `directory` and an engine that has not started."""
    supervisor = EngineSupervisor(("never-started",), directory, stall_s=0, restart_stalled=False)
    service = BatchService(ServiceSettings(jobs_dir=directory / "jobs", max_file_bytes=MAX_FILE_BYTES), supervisor)
    engine = PassThrough(supervisor.endpoints, lambda: supervisor.state)
    rules = AccessRules(api_key=keys.get("api_key"), admin_api_key=keys.get("admin_api_key"), host="127.0.0.1")
    await service.start()
    try:
        async with (
            served(make_app(service, supervisor, engine, rules)) as url,
            aiohttp.ClientSession() as session,
        ):
            yield Client(session, url, directory / "jobs")
    finally:
        await service.stop()


def run(directory: Path, scenario: Callable[[Client], Awaitable[None]], **keys: str) -> None:
    async def bounded() -> None:
        async with serving(directory, **keys) as client:
            await asyncio.wait_for(scenario(client), 20)

    asyncio.run(bounded())
