"""Other requests pass to the engine and back unchanged, as streams, and end with their client."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import aiohttp
import pytest
from aiohttp import web
from served_app import served
from starlette.responses import Response
from yarl import URL

from sgl_batch.api.engine_endpoints import Asked, LoopbackEndpoints
from sgl_batch.api.engine_keeper import EnginesControl
from sgl_batch.api.pass_through import PassThrough
from sgl_batch.api.supervisor import EngineState
from sgl_batch.engine.engine_process import EngineHttp

KEY = "internal"
LONG = b"x" * 3_000_000


@dataclass
class Upstream:
    """An engine's endpoints."""

    seen: list[web.Request] = field(default_factory=list)
    can_resume: asyncio.Event = field(default_factory=asyncio.Event)
    given_up: asyncio.Event = field(default_factory=asyncio.Event)
    arrived: asyncio.Event = field(default_factory=asyncio.Event)

    async def __call__(self, request: web.Request) -> web.StreamResponse:
        self.seen.append(request)
        self.arrived.set()
        answer = getattr(self, request.path.strip("/").replace("/", "_"))
        try:
            response: web.StreamResponse = await answer(request)
            return response
        except asyncio.CancelledError:
            self.given_up.set()
            raise

    async def echo(self, request: web.Request) -> web.Response:
        return web.Response(
            body=await request.content.read(),
            status=201,
            headers={"X-Own": "1", "Access-Control-Allow-Origin": "*", "Content-Type": "text/x"},
        )

    async def wait(self, request: web.Request) -> web.Response:
        await self.can_resume.wait()
        return web.Response(text="late")

    async def events(self, request: web.Request) -> web.StreamResponse:
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await answer.prepare(request)
        await answer.write(b"data: 1\n\n")
        await self.can_resume.wait()
        if request.query.get("break"):
            assert request.transport is not None
            request.transport.abort()
        else:
            await answer.write(b"data: [DONE]\n\n")
        return answer

    async def server_info(self, request: web.Request) -> web.Response:
        return web.json_response({"api_key": KEY, "model_path": "m"})

    async def v1_completions(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "error", "message": "too long", "code": 400}, status=400)

    async def generate(self, request: web.Request) -> web.Response:
        return web.json_response({"message": "too long"}, status=400)


@asynccontextmanager
async def passing(
    phase: str = "ready", control: EnginesControl | None = None
) -> AsyncIterator[tuple[Upstream, str, aiohttp.ClientSession]]:
    """Serve an upstream behind a pass-through, with a client in front of it."""
    upstream = Upstream()
    runner = web.ServerRunner(web.Server(upstream, handler_cancellation=True))
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    http = EngineHttp(base_url=f"http://127.0.0.1:{runner.addresses[0][1]}", api_key=KEY)
    state = EngineState(phase=phase, message="no memory" if phase == "failed" else None, since=0, restarts=0)
    endpoints = LoopbackEndpoints(http)
    engine = PassThrough(lambda: endpoints if phase == "ready" else None, lambda: state, control)
    try:
        async with served(engine) as url, aiohttp.ClientSession(auto_decompress=False) as client:
            yield upstream, url, client
    finally:
        upstream.can_resume.set()
        await endpoints.close()
        await runner.cleanup()


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        await asyncio.wait_for(scenario(), 20)

    asyncio.run(bounded())


def test_a_request_and_its_answer_go_through_as_they_are() -> None:
    async def scenario() -> None:
        async with passing() as (upstream, url, client):
            target = "echo?a=%2F&b=%C3%A9"
            headers = {"Authorization": "Bearer users", "X-Given": "é".encode().decode("latin-1"), "Origin": url}
            async with client.put(URL(f"{url}/{target}", encoded=True), data=LONG, headers=headers) as answer:
                assert (answer.status, await answer.read()) == (201, LONG)
                assert answer.headers["X-Own"] == "1"
                assert answer.content_type == "text/x"
                assert "Access-Control-Allow-Origin" not in answer.headers
            seen = upstream.seen[0]
            assert (seen.method, seen.raw_path) == ("PUT", f"/{target}")
            assert seen.headers["Authorization"] == f"Bearer {KEY}"
            assert seen.headers["Content-Length"] == str(len(LONG))
            assert "Origin" not in seen.headers

    run(scenario)


class Control:
    """Takes requests that control engines."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, str, bytes]] = []

    async def control(self, path: str, asked: Asked) -> Response:
        assert asked.body is not None
        assert not isinstance(asked.body, bytes)
        self.seen.append((path, asked.target, b"".join([chunk async for chunk in asked.body])))
        return Response(b"all", 207)


def test_control_of_several_engines_goes_another_way() -> None:
    async def scenario() -> None:
        control = Control()
        async with passing(control=control) as (upstream, url, client):
            async with client.post(f"{url}/pause_generation?a=1", data=b"{}") as answer:
                assert (answer.status, await answer.read()) == (207, b"all")
            async with client.post(f"{url}/generate", data=b"{}") as answer:
                assert answer.status == 400
            assert control.seen == [("/pause_generation", "/pause_generation?a=1", b"{}")]
            assert len(upstream.seen) == 1

    run(scenario)


def test_a_body_without_a_length_goes_through() -> None:
    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(30):
            yield LONG[:100_000]

    async def scenario() -> None:
        async with passing() as (_, url, client), client.post(f"{url}/echo", data=pieces()) as answer:
            assert await answer.read() == LONG

    run(scenario)


def test_events_are_passed_on_as_they_are_sent() -> None:
    async def scenario() -> None:
        async with passing() as (upstream, url, client), client.get(f"{url}/events") as answer:
            assert await answer.content.readuntil(b"\n\n") == b"data: 1\n\n"
            upstream.can_resume.set()
            assert await answer.content.read() == b"data: [DONE]\n\n"

    run(scenario)


@pytest.mark.parametrize(("method", "path"), [("GET", "wait"), ("POST", "wait"), ("GET", "events"), ("POST", "events")])
def test_a_client_that_goes_away_is_given_up_at_the_engine(method: str, path: str) -> None:
    async def scenario() -> None:
        async with passing() as (upstream, url, client):
            body = {"data": b"{}"} if method == "POST" else {}
            asking = asyncio.ensure_future(client.request(method, f"{url}/{path}", **body))
            await upstream.arrived.wait()
            if path == "events":
                (await asking).close()
            else:
                asking.cancel()
            await upstream.given_up.wait()

    run(scenario)


def test_a_broken_stream_ends_with_an_error_event() -> None:
    async def scenario() -> None:
        async with passing() as (upstream, url, client), client.get(f"{url}/events?break=1") as answer:
            upstream.can_resume.set()
            events = (await answer.read()).decode().split("\n\n")
            error = json.loads(events[1].removeprefix("data: "))["error"]
            assert (error["code"], error["type"]) == ("engine_gone", "server_error")

    run(scenario)


def test_secrets_of_the_engine_stay_inside() -> None:
    async def scenario() -> None:
        async with passing() as (_, url, client), client.get(f"{url}/server_info") as answer:
            assert await answer.json() == {"api_key": None, "model_path": "m"}

    run(scenario)


def test_errors_of_openais_endpoints_get_their_shape_and_others_stay() -> None:
    async def scenario() -> None:
        async with passing() as (_, url, client):
            async with client.post(f"{url}/v1/completions", json={}) as answer:
                assert answer.status == 400
                assert (await answer.json())["error"]["message"] == "too long"
            async with client.post(f"{url}/generate", json={}) as answer:
                assert await answer.json() == {"message": "too long"}

    run(scenario)


@pytest.mark.parametrize("phase", ["starting", "restarting", "failed"])
def test_without_an_engine_the_answer_is_503_with_the_reason(phase: str) -> None:
    async def scenario() -> None:
        async with passing(phase) as (_, url, client), client.post(f"{url}/v1/completions", json={}) as answer:
            assert answer.status == 503
            error = (await answer.json())["error"]
            assert error["code"] == "engine_unavailable"
            assert phase in error["message"]
            assert ("no memory" in error["message"]) == (phase == "failed")
            assert ("Retry-After" in answer.headers) == (phase != "failed")

    run(scenario)


def test_an_engine_that_does_not_listen_is_a_502() -> None:
    async def scenario() -> None:
        state = EngineState(phase="ready", message=None, since=time.time(), restarts=0)
        endpoints = LoopbackEndpoints(EngineHttp(base_url="http://127.0.0.1:1", api_key=KEY))
        engine = PassThrough(lambda: endpoints, lambda: state)
        async with (
            served(engine) as url,
            aiohttp.ClientSession() as client,
            client.get(f"{url}/model_info") as answer,
        ):
            assert answer.status == 502
            assert (await answer.json())["error"]["code"] == "engine_gone"
        await endpoints.close()

    run(scenario)
