"""Several instances look like one engine: ready while one of them is, and what is wrong with others is said."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from sgl_batch.api.engine_keeper import InstanceRow
from sgl_batch.control_plane.instances import engines
from sgl_batch.control_plane.instances.engine_needs import engine_needs
from sgl_batch.control_plane.instances.engines import INSTANCES_FAILED, InstanceEngines, as_row, summary
from sgl_batch.control_plane.instances.host import Host, HostEndedError, NotStartedError
from sgl_batch.control_plane.instances.instance import InstanceView
from sgl_batch.control_plane.instances.placement import Needs, Node
from sgl_batch.control_plane.instances.records import InstanceRecords
from sgl_batch.control_plane.instances.seat import MemberView
from sgl_batch.errors import ConfigError, EngineError

VIEW = InstanceView(name="i1", incarnation=2, node="a", cores=(0, 1), gpus=0, phase="running", message=None)
MEMBER = MemberView(
    name="i1",
    incarnation=2,
    node="a",
    phase="ready",
    message=None,
    restarts=1,
    in_flight=5,
    answered=9,
    lines_per_s=1.23456,
)


def row(name: str, phase: str, message: str | None = None) -> InstanceRow:
    return replace(as_row(VIEW, MEMBER), name=name, phase=phase, message=message)


def test_a_row_has_what_the_pool_and_the_keeper_know() -> None:
    found = as_row(VIEW, MEMBER)
    assert (found.cores, found.phase, found.in_flight, found.answered, found.lines_per_s) == (2, "ready", 5, 9, 1.235)
    assert as_row(replace(VIEW, phase="drained"), MEMBER).phase == "drained"


def test_a_row_says_nothing_of_an_earlier_incarnation() -> None:
    found = as_row(replace(VIEW, incarnation=3), MEMBER)
    assert (found.phase, found.in_flight, found.restarts) == ("starting", 0, 0)


@pytest.mark.parametrize(
    ("phases", "was_ready", "phase"),
    [
        (["ready", "failed"], True, "ready"),
        (["stalled", "restarting"], True, "stalled"),
        (["failed", "failed"], False, "failed"),
        (["failed", "waiting"], True, "restarting"),
        (["starting", "starting"], False, "starting"),
        ([], False, "starting"),
    ],
)
def test_one_ready_instance_is_enough(phases: list[str], was_ready: bool, phase: str) -> None:
    assert summary([row(f"i{n}", one) for n, one in enumerate(phases)], was_ready=was_ready)[0] == phase


def test_what_is_wrong_with_others_is_said() -> None:
    rows = [row("i1", "ready"), row("i2", "waiting", "no room"), *(row(f"i{n}", "starting") for n in range(3, 6))]
    assert summary(rows, was_ready=True)[1] == (
        "1 of 5 instances are ready: i2 is waiting (no room); i3 is starting; i4 is starting and 1 more"
    )
    assert summary([row("i1", "ready"), row("i2", "draining")], was_ready=True) == ("ready", None)


def test_the_models_directory_becomes_absolute_and_its_name_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "m").mkdir()
    found = engine_needs(["--dtype", "float32", "--model-path", "m", "--tp", "2", "--device=cuda"])
    assert found.model == str(tmp_path / "m")
    assert found.argv == (
        *("--model-path", str(tmp_path / "m"), "--served-model-name", "m", "--tp-size", "2", "--device", "cuda"),
        *("--dtype", "float32"),
    )
    assert (found.gpus(8), found.gpus(0)) == (2, 0)
    named = engine_needs(["--model-path", "m", "--served-model-name", "mine"])
    assert named.argv == ("--model-path", str(tmp_path / "m"), "--served-model-name", "mine")


def test_a_name_on_the_hub_is_no_directory() -> None:
    found = engine_needs(["--model", "org/name", "--device", "cpu"])
    assert (found.model, found.argv) == (None, ("--model", "org/name", "--device", "cpu"))
    assert found.gpus(8) == 0
    with pytest.raises(ConfigError, match="invalid int value"):
        engine_needs(["--tp", "two"])


class EndingHost:
    """What starts members: it ends after its first look at the nodes."""

    def __init__(self) -> None:
        self.tables = [[Node(node_id="a", name="a", cores=(0,))]]

    async def nodes(self) -> list[Node]:
        if not self.tables:
            raise HostEndedError("no Ray")
        return self.tables.pop()

    async def start(self, *what: Any) -> Any:
        raise NotStartedError("it does not start")

    async def end(self, *what: Any) -> None:
        """There is nothing."""


def test_the_lines_of_a_run_fail_when_what_starts_its_instances_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engines, "_LOOK_EVERY_S", 0.001)

    async def scenario() -> None:
        run = InstanceEngines(
            cast(Host, EndingHost()),
            InstanceRecords(tmp_path),
            needs=Needs(),
            count=1,
            close=lambda: None,
            outlive=False,
            is_run=True,
        )
        line = asyncio.create_task(run._pool.respond("/v1/completions", {"prompt": "a"}))
        with pytest.raises(HostEndedError, match="no Ray"):
            await asyncio.wait_for(run.start(), 10)
        with pytest.raises(EngineError) as found:
            await line
        assert found.value.code == INSTANCES_FAILED

    asyncio.run(scenario())
