"""Requests go to the instance that has the least to do, as streams, and end there with their client."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest
from scripted_endpoints import ScriptedEndpoints
from scripted_member import ScriptedMember

from sgl_batch.api.engine_endpoints import Asked, EndpointsGoneError
from sgl_batch.control_plane.instances import instance_endpoints as module
from sgl_batch.control_plane.instances.http_calls import HttpCalls
from sgl_batch.control_plane.instances.instance_endpoints import InstanceEndpoints
from sgl_batch.errors import RequestError


class Instances:
    """Ready instances with so many lines each."""

    def __init__(self, *lines):
        self.members = [ScriptedMember(f"i{number}") for number in range(1, len(lines) + 1)]
        self.http = [ScriptedEndpoints() for _ in lines]
        for member, endpoints in zip(self.members, self.http, strict=True):
            member.calls = HttpCalls(lambda endpoints=endpoints: endpoints, part_within_s=0.01)
        self.lines = list(lines)
        self.endpoints = InstanceEndpoints(lambda: list(zip(self.members, self.lines, strict=True)))

    def seen(self):
        return [len(one.seen) for one in self.http]


def run(scenario):
    asyncio.run(asyncio.wait_for(scenario, 20))


async def ask(instances, target="/generate", body=b"{}"):
    async with instances.endpoints.choose().request(Asked(method="POST", target=target, body=body)) as answer:
        return answer.status, b"".join([chunk async for chunk in answer.chunks()])


def test_requests_go_to_the_instance_with_the_fewest_lines_and_in_turn_where_equal():
    async def scenario():
        instances = Instances(3, 1, 1)
        for _ in range(4):
            assert (await ask(instances))[0] == 200
        assert instances.seen() == [0, 2, 2]
        assert InstanceEndpoints(list).choose() is None

    run(scenario())


def test_requests_in_flight_count_like_lines():
    async def scenario():
        instances = Instances(1, 0)
        asking = [asyncio.ensure_future(ask(instances, "/events")) for _ in range(5)]
        await asyncio.gather(*(one.is_waiting.wait() for one in instances.http))
        assert instances.seen() == [2, 3]
        for one in instances.http:
            one.can_resume.set()
        assert {body for _, body in await asyncio.gather(*asking)} == {b"data: 1\n\ndata: [DONE]\n\n"}

    run(scenario())


def test_a_client_that_goes_away_aborts_its_request():
    async def scenario():
        instances = Instances(0)
        asking = asyncio.ensure_future(ask(instances, "/events"))
        await instances.http[0].is_waiting.wait()
        asking.cancel()
        with suppress(asyncio.CancelledError):
            await asking
        while instances.http[0].aborted != ["/events"]:
            await asyncio.sleep(0.001)
        assert len(instances.members[0].calls) == 0

    run(scenario())


def test_an_engine_or_an_instance_that_goes_away_ends_the_request():
    async def scenario():
        instances = Instances(0)
        instances.http[0].breaks = True
        with pytest.raises(EndpointsGoneError, match="the engine is gone"):
            await ask(instances)
        instances.members[0].lose()
        with pytest.raises(EndpointsGoneError, match="its node is gone"):
            await ask(instances)

    run(scenario())


def test_a_body_has_a_limit(monkeypatch):
    async def pieces():
        for _ in range(3):
            yield b"x" * 1000

    async def scenario():
        instances = Instances(0)
        monkeypatch.setattr(module, "MAX_BODY_BYTES", 3000)
        assert (await ask(instances, body=pieces()))[0] == 200
        monkeypatch.setattr(module, "MAX_BODY_BYTES", 2999)
        with pytest.raises(RequestError, match="at most 2,999 bytes"):
            await ask(instances, body=pieces())

    run(scenario())
