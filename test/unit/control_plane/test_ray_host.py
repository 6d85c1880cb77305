"""Errors of Ray that may pass end nothing: it is asked again."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest
import ray

from sgl_batch.control_plane.instances import ray_host
from sgl_batch.control_plane.instances.cluster import Cluster
from sgl_batch.control_plane.instances.host import HostError
from sgl_batch.control_plane.instances.ray_host import RayHost


class BusyCluster:
    """A cluster that does not answer."""

    namespace = "n"

    def usable(self, model: str | None) -> Any:
        raise ray.exceptions.RaySystemError("no answer")


def host() -> RayHost:
    return RayHost(cast(Cluster, BusyCluster()), "s", (), model=None, is_detached=True)


def test_an_error_of_ray_is_one_of_the_host() -> None:
    with pytest.raises(HostError, match="no answer"):
        asyncio.run(host().nodes())


def test_a_place_is_freed_when_ray_answers_again(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def get_actor(name: str, namespace: str) -> Any:
        calls.append(name)
        raise ray.exceptions.RaySystemError("no answer") if len(calls) == 1 else ValueError(name)

    removed: list[str] = []
    monkeypatch.setattr(ray_host, "_AGAIN_AFTER_S", 0.001)
    monkeypatch.setattr(ray, "get_actor", get_actor)
    monkeypatch.setattr(ray.util, "get_placement_group", lambda name: name)
    monkeypatch.setattr(ray.util, "remove_placement_group", removed.append)
    asyncio.run(host().end("i1", 3))
    assert calls == ["i1.3", "i1.3"]
    assert removed == ["n/i1.3"]
