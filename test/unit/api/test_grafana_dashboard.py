"""The dashboard uses only metrics that the server has, and those of instances and of cost."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterable
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from sgl_batch.api.engine_view import EngineView
from sgl_batch.api.metrics import instance_metrics, own_metrics
from sgl_batch.api.supervisor import EngineSupervisor
from sgl_batch.core.answers import EngineStats
from sgl_batch.jobs.batch_service.service import BatchService
from sgl_batch.jobs.batch_service.settings import ServiceSettings

_COUNTED = dict.fromkeys(("expert_calls", "expert_rows", "prompt_tokens", "output_tokens"), 1.0)


class Instances(Collector):
    """The metrics of several instances."""

    def collect(self) -> Iterable[Metric]:
        return instance_metrics([])


@pytest.fixture
def counted(tmp_path: Path) -> set[str]:
    """Return the names of all metrics, with an engine that has sent statistics."""

    async def names() -> set[str]:
        supervisor = EngineSupervisor((), tmp_path, stall_s=0.0, restart_stalled=False)
        assert isinstance(supervisor.view, EngineView)
        supervisor.view.begin()
        supervisor.view.add(EngineStats(sequences={"RUNNING": 1}, part_s={"experts": 1.0}, counters=_COUNTED), 0.0)
        service = BatchService(ServiceSettings(jobs_dir=tmp_path / "jobs", price_per_hour=2.0), supervisor)
        await service.start()
        text = generate_latest(own_metrics(service.snapshot, supervisor)).decode()
        await service.stop()
        instances = CollectorRegistry(auto_describe=False)
        instances.register(Instances())
        text += generate_latest(instances).decode()
        described = set(re.findall(r"# TYPE (\S+) ", text))
        return described | set(re.findall(r"^([a-z_:]+)[ {]", text, flags=re.MULTILINE))

    return asyncio.run(names())


def test_every_metric_of_the_dashboard_is_counted(repo_root: Path, counted: set[str]) -> None:
    path = repo_root / "python" / "sgl_batch" / "api" / "grafana_dashboard.json"
    dashboard = json.loads(path.read_text(encoding="utf-8"))
    asked = {
        name
        for panel in dashboard["panels"]
        for target in panel["targets"]
        for name in re.findall(r"sgl_batch:[a-z_]+", target["expr"])
    }
    assert len(asked) > 15
    assert asked <= counted, asked - counted
    assert asked >= {name for name in counted if ":instance_" in name}
    assert "sgl_batch:jobs_cost_total" in asked
    positions = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in dashboard["panels"]]
    assert len(set(positions)) == len(positions)
