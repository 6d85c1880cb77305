"""Requests to the endpoints of an instance: parts come once, streams as they are sent, unwanted ones are aborted."""

from __future__ import annotations

import asyncio

from scripted_endpoints import ScriptedEndpoints

from sgl_batch.control_plane.instances.http_calls import HttpCalls
from sgl_batch.control_plane.instances.http_messages import HttpMore, HttpRequest


def asked(target, call="a"):
    return HttpRequest(call, "POST", target, (), b"{}")


def run(scenario):
    asyncio.run(asyncio.wait_for(scenario, 20))


async def until(condition):
    for _ in range(2000):
        if condition():
            return
        await asyncio.sleep(0.002)
    raise AssertionError("it does not come about")


async def rest(calls, part, call="a"):
    """Return the data of this part and of all that follow."""
    data = part.data
    while not part.is_last:
        part = await calls.more(HttpMore(call, part.number + 1))
        data += part.data
    assert part.fault is None
    return data


def test_a_part_that_is_asked_for_again_is_the_same_and_the_request_is_sent_once():
    async def scenario():
        endpoints = ScriptedEndpoints()
        calls = HttpCalls(lambda: endpoints)
        first = await calls.begin(asked("/long"))
        assert await calls.begin(asked("/long")) == first
        data = await rest(calls, first)
        assert len(data) == 4_000_000
        assert len(endpoints.seen) == 1
        calls.end("a")
        assert len(calls) == 0

    run(scenario())


def test_events_come_as_they_are_sent():
    async def scenario():
        endpoints = ScriptedEndpoints()
        calls = HttpCalls(lambda: endpoints, part_within_s=0.01)
        part = await calls.begin(asked("/events"))
        while not part.data:
            part = await calls.more(HttpMore("a", part.number + 1))
        assert (part.status, part.data, part.is_last) == (200, b"data: 1\n\n", False)
        endpoints.can_resume.set()
        part = await calls.more(HttpMore("a", part.number + 1))
        assert await rest(calls, part) == b"data: [DONE]\n\n"

    run(scenario())


def test_a_request_that_is_not_wanted_any_more_is_aborted():
    async def scenario():
        endpoints = ScriptedEndpoints()
        calls = HttpCalls(lambda: endpoints, abandoned_after_s=0.05, part_within_s=0.01)
        await calls.begin(asked("/events", "ended"))
        await endpoints.is_waiting.wait()
        calls.end("ended")
        await until(lambda: endpoints.aborted == ["/events"])
        await calls.begin(asked("/events", "abandoned"))
        await until(lambda: endpoints.aborted == ["/events", "/events"])
        assert len(calls) == 0
        assert (await calls.more(HttpMore("abandoned", 2))).fault == "the request was aborted"

    run(scenario())


def test_without_an_engine_the_fault_says_so():
    async def scenario():
        part = await HttpCalls(lambda: None).begin(asked("/long"))
        assert (part.is_last, part.fault) == (True, "no engine is ready")

    run(scenario())
