"""What does not fit on a cluster is refused at once, with what was found there and what is needed."""

from __future__ import annotations

import json
import platform
import socket
from typing import Any

import pytest

from sgl_batch.control_plane.instances import cluster
from sgl_batch.control_plane.instances.address_look import RAY_VERSION, check_address, check_found
from sgl_batch.control_plane.instances.cluster import Cluster, NodeFacts, as_node, check_ray, fault_of, is_agent
from sgl_batch.errors import ConfigError
from sgl_batch.installed_versions import version_of


def found(**changes: Any) -> str:
    here = {"ray_version": RAY_VERSION, "python_version": platform.python_version(), "has_node_here": True}
    return json.dumps({**here, **changes})


def test_a_cluster_that_fits_is_joined() -> None:
    check_found("head:6379", found(), "")


@pytest.mark.parametrize(
    ("said", "errors", "message"),
    [
        (found(ray_version="2.59.0"), "", "has Ray 2.59.0, and this process has 2.60.0"),
        (found(python_version="3.9.1"), "", "has Python 3.9.1, and this process has"),
        (found(has_node_here=False), "", r"this machine is no node of .*`ray start --address=head:6379"),
        ("", "RPC error: InvalidAuthToken: Authentication token is missing", "refuses this process's token"),
        ("", "Failed to connect\nsomething else", "no Ray cluster answers at --ray-address head:6379: something else"),
        ("", "", "no Ray cluster answers"),
    ],
)
def test_a_cluster_that_does_not_fit_is_refused(said: str, errors: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_found("head:6379", said, errors)


@pytest.mark.parametrize(
    ("command", "is_one"),
    [
        (["python", "-u", "/agent/ray/dashboard/agent.py", "--x=1"], True),
        (["python", "/venv/ray/_private/runtime_env/agent/main.py", "--x=1"], True),
        (["ray::DashboardAgent"], True),
        (["ray::RuntimeEnvAgent", ""], True),
        (["ray::IDLE"], False),
        (["/agent/bin/python3", "/agent/ray/_private/workers/default_worker.py", "--runtime-env-agent-port=1"], False),
        ([], False),
    ],
)
def test_agents_are_told_from_workers(command: list[str], is_one: bool) -> None:
    assert is_agent(command) == is_one


@pytest.mark.parametrize("address", ["head", "auto", "ray://head:10001", "head:0", ":6379"])
def test_an_address_is_host_and_port(address: str) -> None:
    with pytest.raises(ConfigError, match="it must be HOST:PORT"):
        check_address(address)


def test_a_port_without_a_server_is_refused_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(ConfigError, match=rf"no Ray cluster answers at --ray-address 127\.0\.0\.1:{port}: .*refused"):
        check_address(f"127.0.0.1:{port}")


def test_a_server_that_is_silent_is_given_up() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(ConfigError, match=r"within 0\.1 s"):
            check_address(address, within_s=0.1)


def facts(**changes: Any) -> NodeFacts:
    here: dict[str, Any] = {
        "cores": (0, 2, 4),
        "python": platform.python_version(),
        "sgl_batch": version_of("sgl-batch"),
        "has_model": True,
    }
    return NodeFacts(**{**here, **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sgl_batch": None}, "sgl_batch is not installed"),
        ({"sgl_batch": "0.0.9"}, "it has sgl_batch 0.0.9, and this process has"),
        ({"python": "3.12.99"}, "it has Python 3.12.99, and this process has"),
        ({"has_model": False}, "it has no /models/m"),
    ],
)
def test_a_node_that_cannot_run_an_instance_says_why(changes: dict[str, Any], message: str) -> None:
    assert message in str(fault_of(facts(**changes), "/models/m"))


def test_a_node_that_has_all_is_used() -> None:
    assert fault_of(facts(), "/models/m") is None
    assert fault_of(facts(has_model=False), None) is None


def row(name: str, *, is_alive: bool = True) -> dict[str, Any]:
    return {
        "NodeID": name,
        "Alive": is_alive,
        "NodeManagerHostname": name,
        "NodeManagerAddress": "1.2.3.4",
        "Resources": {"CPU": 2.0},
    }


@pytest.mark.parametrize("is_alive", [True, False])
def test_a_node_that_dies_while_it_is_looked_at_is_left_out(monkeypatch: pytest.MonkeyPatch, is_alive: bool) -> None:
    import ray
    from ray._private.state import state

    def look(self: Cluster, node_ids: list[str], model: str | None) -> dict[str, str]:
        self._facts["a"] = facts()
        return {one: "a task on it failed" for one in node_ids if one != "a"}

    tables = [[row("a"), row("b")], [row("a"), row("b", is_alive=is_alive)]]
    monkeypatch.setattr(ray, "nodes", lambda: tables.pop(0) if len(tables) > 1 else tables[0])
    monkeypatch.setattr(Cluster, "_look", look)
    monkeypatch.setattr(state, "get_draining_nodes", dict)
    assert [one.name for one in Cluster("n", is_own=False).nodes(None)] == ["a (1.2.3.4)"]


def test_a_node_gives_as_many_cores_as_ray_may_use() -> None:
    row = {
        "NodeID": "f0",
        "NodeManagerHostname": "big",
        "NodeManagerAddress": "10.0.0.7",
        "Resources": {"CPU": 2.0, "GPU": 1.0},
    }
    found = as_node(row, facts(), is_draining=True)
    assert (found.name, found.cores, found.gpus, found.draining) == ("big (10.0.0.7)", (0, 2), 1, True)


def test_a_missing_ray_is_named_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "version_of", lambda name: None)
    with pytest.raises(ConfigError, match=r"--instances needs ray 2.60.0, and it is not installed: pip install"):
        check_ray()
