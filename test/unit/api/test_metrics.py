"""What /metrics says of the engine's time and its cost."""

from __future__ import annotations

from prometheus_client import generate_latest

from sgl_batch.api.metrics import own_metrics
from sgl_batch.api.supervisor import EngineSupervisor
from sgl_batch.jobs.batch_service.objects import ServiceSnapshot, StorageState


def metrics(directory, price_per_hour):
    snapshot = ServiceSnapshot(
        jobs=(),
        jobs_by_status={},
        in_flight=0,
        in_flight_bytes=0,
        partial_output_tokens=0,
        engine_ready=True,
        storage=StorageState(),
        finished_s_ago=None,
        fault=None,
        counters={"engine_s": 1800.0},
        price_per_hour=price_per_hour,
    )
    supervisor = EngineSupervisor((), directory, stall_s=0.0, restart_stalled=False)
    return generate_latest(own_metrics(lambda: snapshot, supervisor)).decode()


def test_the_time_of_jobs_costs_what_the_price_says(tmp_path):
    text = metrics(tmp_path, 3.0)
    assert "sgl_batch:jobs_engine_seconds_total 1800.0" in text
    assert "sgl_batch:jobs_cost_total 1.5" in text


def test_without_a_price_there_is_no_cost(tmp_path):
    text = metrics(tmp_path, None)
    assert "sgl_batch:jobs_engine_seconds_total 1800.0" in text
    assert "jobs_cost" not in text
