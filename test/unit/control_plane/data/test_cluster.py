"""When the engine's group is known without asking a node, and what is taken where no node answers. No Ray runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import ray

from sgl_batch.config import BatchConfig
from sgl_batch.control_plane.data import cluster

DEFAULT = BatchConfig().forward.b_moe_decode


class Task:
    """Stands for Ray's task: `remote` of it has this object, whatever it is asked."""

    def __init__(self, asked: list[Any]) -> None:
        self._asked = asked

    def remote(self, arguments: dict[str, Any]) -> Task:
        self._asked.append(arguments)
        return self


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What nodes were asked to plan."""
    questions: list[Any] = []

    def remote(**options: Any) -> Callable[[object], Task]:
        return lambda function: Task(questions)

    monkeypatch.setattr(ray, "remote", remote)
    monkeypatch.setattr(ray, "get", lambda task, timeout: 48)
    monkeypatch.setattr(ray, "cancel", lambda task, force: None)
    return questions


@pytest.mark.parametrize(
    ("arguments", "on_gpu", "group"),
    [({"b_moe_decode": 64}, False, 64), ({}, True, DEFAULT), ({"plan": "off"}, False, DEFAULT)],
)
def test_a_group_that_is_given_or_not_planned_is_known_without_a_node(
    asked: list[Any], arguments: dict[str, Any], on_gpu: bool, group: int
) -> None:
    assert cluster.decode_group(arguments, 2, on_gpu=on_gpu) == group
    assert asked == []


def test_a_node_plans_for_an_engine_on_cpus(asked: list[Any]) -> None:
    assert cluster.decode_group({"model_path": "m"}, 2, on_gpu=False) == 48
    assert asked == [{"model_path": "m"}]


@pytest.mark.usefixtures("asked")
def test_where_no_node_answers_the_default_group_is_taken_and_the_log_says_why(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def get(task: object, timeout: float) -> int:
        raise ray.exceptions.GetTimeoutError("no node is free")

    monkeypatch.setattr(ray, "get", get)
    caplog.set_level("WARNING", logger=cluster.__name__)  # other tests may have set the level of all loggers
    assert cluster.decode_group({}, 2, on_gpu=False) == DEFAULT
    assert "the engine's plan is not known" in caplog.text
    assert "no node is free" in caplog.text
