"""The control endpoints of profiles and logs: answers name the limits, refusals have OpenAI's shape."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette

from sgl_batch.engine.control_routes import control_routes
from sgl_batch.errors import RequestError
from sgl_batch.requests.profile_limits import steps_of


class Manager:
    """The part of a tokenizer manager that the routes use."""

    request_log_paths = ("/logs/requests.log",)

    def __init__(self) -> None:
        self.request_logger = SimpleNamespace(log_requests=False)
        self.started: list[Any] = []

    async def start_profile(self, asked: Any) -> None:
        asked.num_steps = steps_of(asked.num_steps)
        self.started.append(asked)

    async def stop_profile(self) -> None:
        raise RuntimeError("Profiling is not in progress. Call /start_profile first.")

    def configure_logging(self, asked: Any) -> None:
        if asked.log_requests_level == 9:
            raise RequestError(code="invalid_logging", message="log_requests_level is 9", param="log_requests_level")
        self.request_logger.log_requests = asked.log_requests


@pytest.fixture
def manager() -> Manager:
    return Manager()


class Client:
    """A client of an app with the routes."""

    def __init__(self, manager: Manager) -> None:
        self._app = Starlette(routes=control_routes(manager))

    def post(self, path: str, **body: Any) -> httpx.Response:
        async def ask() -> httpx.Response:
            transport = httpx.ASGITransport(self._app)
            async with httpx.AsyncClient(transport=transport, base_url="http://engine") as client:
                return await client.post(path, **body)

        return asyncio.run(ask())


@pytest.fixture
def client(manager: Manager) -> Client:
    return Client(manager)


def test_a_profile_says_when_it_ends_and_one_that_is_too_long_is_refused(manager: Manager, client: Client) -> None:
    answer = client.post("/start_profile")
    assert (answer.status_code, manager.started[0].num_steps) == (200, 20)
    assert "20 steps, 60 s or 256.00 MiB of memory" in answer.text
    assert "5 steps" in client.post("/start_profile", json={"num_steps": 5, "output_dir": "/tmp"}).text
    refused = client.post("/start_profile", json={"num_steps": 100_000})
    assert refused.status_code == 400
    error = refused.json()["error"]
    assert (error["param"], error["code"]) == ("num_steps", "invalid_profile")
    assert "give 1 to 100, the limit" in error["message"]
    assert client.post("/stop_profile").status_code == 409


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("[1]", "not a JSON object"),
        ("{", "the request body is wrong"),
        ('{"x": 1}', "no field 'x'"),
        ('{"num_steps": "a"}', "int"),
    ],
)
def test_a_body_that_is_wrong_is_refused(client: Client, content: str, words: str) -> None:
    answer = client.post("/start_profile", content=content)
    assert answer.status_code == 400
    assert words in answer.json()["error"]["message"]


def test_logging_says_where_requests_go_and_how_much_that_can_be(client: Client) -> None:
    assert "not logged" in client.post("/configure_logging", json={"log_requests": False}).text
    text = client.post("/configure_logging", json={"log_requests": True}).text
    assert "/logs/requests.log, at most 4 files of 64.00 MiB each" in text
    assert client.post("/configure_logging", json={"log_requests_level": 9}).status_code == 400
