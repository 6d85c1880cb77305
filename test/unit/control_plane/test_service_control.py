"""One request controls all instances, one answer says what came of it, and instances that join later get the state."""

from __future__ import annotations

import asyncio
import json

import pytest
from scripted_member import ScriptedMember

from sgl_batch.api.engine_endpoints import Asked
from sgl_batch.control_plane.instances import service_control as module
from sgl_batch.control_plane.instances.control_routes import refusal
from sgl_batch.control_plane.instances.records import InstanceRecords
from sgl_batch.control_plane.instances.service_control import ServiceControl
from sgl_batch.control_plane.instances.service_state import FROM_DISK, PAUSE, ServiceState, changed
from sgl_batch.errors import RequestError

DISK = b'{"model_path": "b"}'


class Service:
    """Two instances and what controls them."""

    def __init__(self, *names):
        self.members = [ScriptedMember(name) for name in names or ("i1", "i2")]
        self.kept, self.weights = [], 0
        self.control = ServiceControl(
            lambda: self.members, self._note_weights, state=ServiceState(), keep=self.kept.append
        )

    def _note_weights(self):
        self.weights += 1

    async def start(self):
        for member in self.members:
            await self.control.prepare(member)
        return self

    async def ask(self, path, body=b"{}"):
        response = await self.control.control(path, Asked(method="POST", target=path, body=body))
        return response.status_code, json.loads(response.body)


def run(scenario):
    return asyncio.run(asyncio.wait_for(scenario, 20))


def test_a_pause_reaches_all_and_those_that_join_later():
    async def scenario():
        service = await Service().start()
        status, body = await service.ask(PAUSE)
        assert (status, body["success"], body["weight_version"]) == (200, True, "v0")
        assert body["instances"]["i2"] == {"success": True, "message": "i2 says 200", "weight_version": "v0"}
        service.members.append(ScriptedMember("i3"))
        await service.control.prepare(service.members[2])
        assert service.members[2].state == changed(ServiceState(), PAUSE, b"{}") == service.kept[-1]
        assert service.weights == 0

    run(scenario())


def test_an_update_that_fails_on_one_instance_says_who_has_which_weights():
    async def scenario():
        service = await Service().start()
        service.members[0].version = "v1"
        service.members[1].refuses[FROM_DISK] = 400
        status, body = await service.ask(FROM_DISK, DISK)
        assert (status, body["success"], body["weight_version"]) == (400, False, None)
        assert body["message"] == f"{FROM_DISK}: 1 of 2 ready instances have succeeded; failed: i2"
        assert {name: one["weight_version"] for name, one in body["instances"].items()} == {"i1": "v1", "i2": "v0"}
        assert service.kept[-1].weights.from_disk == DISK
        assert service.weights == 2

    run(scenario())


def test_an_update_that_fails_everywhere_changes_nothing():
    async def scenario():
        service = await Service().start()
        for member in service.members:
            member.refuses[FROM_DISK] = 400
        status, body = await service.ask(FROM_DISK, DISK)
        assert (status, body["success"]) == (400, False)
        assert service.kept[-1] == ServiceState()
        assert [member.state for member in service.members] == [ServiceState()] * 2

    run(scenario())


def test_an_instance_that_is_not_ready_does_not_count_and_one_that_is_lost_does():
    async def scenario():
        service = await Service("i1", "i2", "i3").start()
        service.members[1].refuses[PAUSE] = 0
        service.members[2].lose()
        status, body = await service.ask(PAUSE)
        assert (status, body["success"]) == (503, False)
        assert [one["success"] for one in body["instances"].values()] == [True, None, False]
        assert "failed: i3" in body["message"]

    run(scenario())


def test_an_instance_that_hangs_does_not_keep_others_from_a_pause(monkeypatch):
    async def scenario():
        service = await Service().start()
        hanging = ScriptedMember("i3")
        hanging.adopt = hanging.control = lambda _: asyncio.Event().wait()
        joining = asyncio.ensure_future(service.control.prepare(hanging))
        service.members[1].control = hanging.control
        monkeypatch.setattr(module, "_WITHIN_S", {PAUSE: 0.01})
        status, body = await service.ask(PAUSE)
        assert status == 504
        assert [one["success"] for one in body["instances"].values()] == [True, False]
        joining.cancel()

    run(scenario())


def test_an_instance_that_joins_during_a_change_gets_what_came_of_it():
    async def scenario():
        service = await Service().start()
        joined = ScriptedMember("i3")
        adopted, may_go = [], asyncio.Event()

        async def adopt(state):
            adopted.append(state)
            await may_go.wait()

        joined.adopt = adopt
        joining = asyncio.ensure_future(service.control.prepare(joined))
        await asyncio.sleep(0)
        await service.ask(PAUSE)
        may_go.set()
        await joining
        assert adopted == [ServiceState(), changed(ServiceState(), PAUSE, b"{}")]

    run(scenario())


def test_without_a_ready_instance_nothing_is_changed():
    async def scenario():
        service = await Service("i1").start()
        service.members[0].refuses[PAUSE] = 0
        status, body = await service.ask(PAUSE)
        assert (status, body["error"]["code"]) == (503, "engine_unavailable")
        assert service.kept[-1] == ServiceState()

    run(scenario())


def test_a_state_that_cannot_be_written_changes_nothing():
    async def scenario():
        service = await Service("i1").start()

        def full(state):
            raise OSError("no space left")

        service.control = ServiceControl(lambda: service.members, lambda: None, state=ServiceState(), keep=full)
        await service.start()
        with pytest.raises(RequestError, match="no space left"):
            await service.ask(PAUSE)
        assert service.members[0].controls == []

    run(scenario())


def test_a_server_that_is_started_again_knows_the_state(tmp_path):
    state = changed(changed(ServiceState(), FROM_DISK, DISK), PAUSE, None)
    InstanceRecords(tmp_path).keep_state(state)
    assert InstanceRecords(tmp_path).state == state


def test_what_changes_no_state_is_sent_to_all_and_not_kept():
    async def scenario():
        service = await Service().start()
        assert (await service.ask("/abort_request", b'{"abort_all": true}'))[0] == 200
        assert [len(member.controls) for member in service.members] == [1, 1]
        assert service.kept == []

    run(scenario())


def test_routes_that_make_no_sense_for_several_engines_are_refused():
    async def scenario():
        service = await Service().start()
        status, body = await service.ask("/init_weights_update_group")
        assert (status, body["error"]["code"]) == (501, "many_instances")
        assert service.members[0].controls == []

    run(scenario())
    assert "safetensors" in refusal("/update_weights_from_tensor", b"{}")
    assert refusal("/update_weights_from_tensor", b'{"load_format": "safetensors"}') is None
    assert refusal("/flush_cache", None) is None
