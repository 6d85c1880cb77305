"""Instances are shown to the administrator alone, and a server without them says so."""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path

import aiohttp
import pytest
from fastapi import FastAPI
from files_client import Client, run
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from served_app import served

from sgl_batch.api.auth import is_for_admin
from sgl_batch.api.engine_keeper import InstanceRow
from sgl_batch.api.errors import add_error_handlers
from sgl_batch.api.front_options import parse_front_options
from sgl_batch.api.instance_flags import InstanceOptions, add_instance_flags, instance_options
from sgl_batch.api.instances import INSTANCES_PATH, instances_router
from sgl_batch.api.metrics import instance_metrics
from sgl_batch.errors import ConfigError, RequestError

ROW = InstanceRow(
    name="i1",
    incarnation=2,
    node="big (10.0.0.7)",
    cores=4,
    gpus=1,
    phase="ready",
    message=None,
    restarts=0,
    in_flight=7,
    answered=30,
    lines_per_s=1.5,
)


class OneInstance:
    """Control of an instance of which each call is noted."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, ...]] = []

    def rows(self) -> list[InstanceRow]:
        return [ROW]

    async def add(self) -> InstanceRow:
        self.calls.append(("add",))
        return ROW

    async def drain(self, name: str) -> InstanceRow:
        self.calls.append(("drain", name))
        return ROW

    async def remove(self, name: str) -> InstanceRow:
        raise RequestError(code="instance_not_found", message=f"there is no instance {name!r}", status_code=404)


def options(*argv: str) -> InstanceOptions | None:
    parser = argparse.ArgumentParser()
    add_instance_flags(parser)
    return instance_options(parser.parse_args(argv))


def test_without_flags_there_is_one_engine_without_ray() -> None:
    assert options() is None
    assert parse_front_options([]).instances is None


def test_a_number_or_auto_asks_for_instances() -> None:
    assert options("--instances", "3") == InstanceOptions(count=3)
    assert options("--instances", "auto", "--cpus-per-instance", "2") == InstanceOptions(count=None, cpus=2)
    assert options("--ray-address", "head:6379") == InstanceOptions(count=None, ray_address="head:6379")
    assert parse_front_options(["--instances", "2", "--model-path", "m"]).instances == InstanceOptions(count=2)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("--instances", "0"), "--instances is 0; it must be auto, or a number of at least 1"),
        (("--instances", "many"), "--instances is many; it must be auto"),
        (("--instances", "2", "--cpus-per-instance", "0"), "--cpus-per-instance is 0; it must be at least 1"),
        (("--cpus-per-instance", "2"), "--cpus-per-instance is given without --instances"),
    ],
)
def test_wrong_values_are_refused(argv: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        options(*argv)


def test_the_administrator_alone_sees_instances() -> None:
    assert is_for_admin(INSTANCES_PATH)
    assert is_for_admin(INSTANCES_PATH + "/i1/drain")
    assert not is_for_admin("/v1/sgl_batch/progress")


def test_a_server_with_one_engine_has_no_instances(tmp_path: Path) -> None:
    async def scenario(client: Client) -> None:
        status, body = await client.ask("GET", INSTANCES_PATH, headers={"Authorization": "Bearer a"})
        assert (status, body["error"]["code"]) == (409, "no_instances")
        assert (await client.ask("GET", INSTANCES_PATH, headers={"Authorization": "Bearer k"}))[0] == 401
        assert (await client.ask("GET", "/v1/sgl_batch/progress"))[1]["instances"] == []

    run(tmp_path, scenario, admin_api_key="a")


def test_instances_are_listed_added_drained_and_removed() -> None:
    async def scenario() -> None:
        control, app = OneInstance(), FastAPI()
        app.include_router(instances_router(lambda: control))
        add_error_handlers(app)
        async with served(app) as url, aiohttp.ClientSession(url) as client:
            async with client.get(INSTANCES_PATH) as answer:
                rows = (await answer.json())["data"]
            assert [(one["id"], one["node"], one["lines_per_s"]) for one in rows] == [("i1", "big (10.0.0.7)", 1.5)]
            async with client.post(INSTANCES_PATH) as answer:
                assert (await answer.json())["incarnation"] == 2
            async with client.post(INSTANCES_PATH + "/i1/drain") as answer:
                assert answer.status == 200
            async with client.delete(INSTANCES_PATH + "/i9") as answer:
                assert (answer.status, (await answer.json())["error"]["code"]) == (404, "instance_not_found")
        assert control.calls == [("add",), ("drain", "i1")]

    asyncio.run(scenario())


def test_each_instance_has_its_own_metrics() -> None:
    class Rows(Collector):
        def collect(self) -> list[Metric]:
            return list(instance_metrics([ROW]))

    registry = CollectorRegistry(auto_describe=False)
    registry.register(Rows())
    text = generate_latest(registry).decode()
    assert 'sgl_batch:instance_ready{instance="i1",node="big (10.0.0.7)"} 1.0' in text
    assert 'sgl_batch:instance_lines_per_second{instance="i1",node="big (10.0.0.7)"} 1.5' in text
    assert 'sgl_batch:instance_lines_answered_total{instance="i1",node="big (10.0.0.7)"} 30.0' in text
