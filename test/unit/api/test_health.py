"""/health is 200 while the engine answers, and always says what is wrong."""

from __future__ import annotations

import pytest

from sgl_batch.api.health import health_of
from sgl_batch.api.supervisor import EngineState
from sgl_batch.jobs.batch_service.objects import ServiceSnapshot, StorageState


def engine(phase: str, message: str | None = None) -> EngineState:
    return EngineState(phase=phase, message=message, since=1700000000.5, restarts=2, forward="coroutine")


def service(storage: StorageState | None = None, fault: str | None = None) -> ServiceSnapshot:
    return ServiceSnapshot(
        jobs=(),
        jobs_by_status={},
        in_flight=0,
        in_flight_bytes=0,
        partial_output_tokens=0,
        engine_ready=True,
        storage=storage or StorageState(),
        finished_s_ago=None,
        fault=fault,
        counters={},
    )


def test_an_engine_that_answers_is_healthy():
    status, body = health_of(engine("ready"), service())
    assert (status, body["status"]) == (200, "ok")
    expected = {"state": "ready", "message": None, "since": 1700000000, "restarts": 2, "forward": "coroutine"}
    assert body["engine"] == expected


@pytest.mark.parametrize("phase", ["starting", "restarting", "stalled", "failed", "stopped"])
def test_an_engine_that_does_not_answer_is_unhealthy_with_the_reason(phase):
    status, body = health_of(engine(phase, "rank 1 died"), service())
    assert (status, body["status"], body["engine"]["message"]) == (503, phase, "rank 1 died")


def test_a_full_disk_degrades_a_server_that_still_answers():
    full = StorageState(ok=False, message="no space left", since=5)
    status, body = health_of(engine("ready"), service(full))
    assert (status, body["status"]) == (200, "degraded")
    assert body["storage"] == {"ok": False, "message": "no space left", "since": 5}


def test_a_service_that_a_fault_has_stopped_is_unhealthy():
    status, body = health_of(engine("ready"), service(fault="KeyError: 'x'"))
    assert (status, body["status"], body["fault"]) == (503, "faulty", "KeyError: 'x'")
