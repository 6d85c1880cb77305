"""An engine takes lines once it has the state of the service, and an update that failed keeps lines from it."""

from __future__ import annotations

import asyncio

from scripted_endpoints import ScriptedEndpoints

from sgl_batch.control_plane.instances.engine_preparation import PreparedEngine
from sgl_batch.control_plane.instances.http_messages import Control, HttpRequest
from sgl_batch.control_plane.instances.service_state import (
    CONTINUE,
    FROM_DISK,
    FROM_TENSOR,
    PAUSE,
    ServiceState,
    changed,
)

NEW = ServiceState()
DISK = b'{"model_path": "b"}'
LOADED = changed(NEW, FROM_DISK, DISK)


class Source:
    """What keeps an engine running: a new one after each `restart`."""

    def __init__(self):
        self.http = ScriptedEndpoints()
        self.engine = object()
        self.news = 0

    def current(self):
        return self.engine

    def endpoints(self):
        return self.http if self.engine is not None else None

    def restart(self):
        self.http.seen.clear()
        self.engine = object()

    def noted(self):
        self.news += 1


def made(source):
    return PreparedEngine(source, source.noted)


def control(path, before, after, body=b"{}", call="a"):
    return Control(request=HttpRequest(call, "POST", path, (), body), before=before, after=after)


def paths(source):
    return [target for _, target, _ in source.http.seen]


async def settled(prepared):
    while prepared.current() is None and (prepared.phase or ("",))[0] == "updating":
        await asyncio.sleep(0.001)


def run(scenario):
    asyncio.run(asyncio.wait_for(scenario, 20))


def test_a_new_engine_gets_weights_and_pause_before_lines():
    async def scenario():
        source = Source()
        prepared = made(source)
        prepared.adopt(changed(LOADED, PAUSE, b'{"mode": "retract"}'))
        assert prepared.current() is None
        assert prepared.phase[0] == "updating"
        await settled(prepared)
        assert source.http.seen == [("POST", FROM_DISK, DISK), ("POST", PAUSE, b'{"mode": "retract"}')]
        assert prepared.current() is source.engine
        assert source.news == 1
        source.restart()
        assert prepared.current() is None
        await settled(prepared)
        assert paths(source) == [FROM_DISK, PAUSE]

    run(scenario())


def test_an_engine_in_the_state_of_the_service_is_ready_at_once():
    async def scenario():
        source = Source()
        prepared = made(source)
        prepared.adopt(NEW)
        assert prepared.current() is source.engine
        assert prepared.phase is None

    run(scenario())


def test_weights_that_cannot_be_had_again_keep_lines_from_a_new_engine():
    async def scenario():
        source = Source()
        prepared = made(source)
        lost = changed(LOADED, FROM_TENSOR, b"{}")
        prepared.adopt(lost)
        prepared.current()
        await settled(prepared)
        assert prepared.phase[0] == "outdated"
        assert "an update from tensors, which is not kept" in prepared.phase[1]
        after = changed(lost, FROM_DISK, DISK)
        assert (await prepared.control(control(FROM_DISK, lost, after, DISK))).status == 200
        assert prepared.current() is source.engine

    run(scenario())


def test_a_failed_update_keeps_lines_from_the_engine_until_it_succeeds():
    async def scenario():
        source = Source()
        prepared = made(source)
        assert prepared.current() is source.engine
        source.http.refuses[FROM_DISK] = 400
        answer = await prepared.control(control(FROM_DISK, NEW, LOADED, DISK))
        assert (answer.status, answer.weight_version) == (400, "default")
        assert prepared.phase == ("outdated", f"{FROM_DISK}: {answer.body.decode()}")
        # A pause that succeeds does not change that.
        paused = changed(LOADED, PAUSE, b"{}")
        assert (await prepared.control(control(PAUSE, LOADED, paused, call="b"))).status == 200
        assert prepared.phase[0] == "outdated"
        source.http.refuses.clear()
        again = changed(paused, FROM_DISK, DISK)
        answer = await prepared.control(control(FROM_DISK, paused, again, DISK, call="c"))
        assert (answer.status, answer.weight_version) == (200, "b")
        assert prepared.current() is source.engine

    run(scenario())


def test_an_update_that_failed_everywhere_is_forgotten():
    async def scenario():
        source = Source()
        prepared = made(source)
        prepared.current()
        source.http.refuses[FROM_DISK] = 400
        await prepared.control(control(FROM_DISK, NEW, LOADED, DISK))
        prepared.adopt(NEW)
        assert prepared.current() is source.engine

    run(scenario())


def test_a_request_that_is_sent_again_is_not_repeated():
    async def scenario():
        source = Source()
        prepared = made(source)
        prepared.current()
        asked = control(PAUSE, NEW, changed(NEW, PAUSE, b"{}"))
        assert await prepared.control(asked) == await prepared.control(asked)
        assert paths(source) == [PAUSE]

    run(scenario())


def test_an_engine_that_is_not_ready_gets_the_change_when_it_is():
    async def scenario():
        source = Source()
        engine, source.engine = source.engine, None
        prepared = made(source)
        assert (await prepared.control(control(PAUSE, NEW, changed(NEW, PAUSE, b"{}")))).status == 0
        source.engine = engine
        prepared.current()
        await settled(prepared)
        assert paths(source) == [PAUSE]
        await prepared.control(control(CONTINUE, changed(NEW, PAUSE, b"{}"), NEW, call="b"))
        assert prepared.current() is engine

    run(scenario())
