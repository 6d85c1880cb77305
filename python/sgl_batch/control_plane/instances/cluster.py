"""Owns the connection to a Ray cluster: one that runs already, or one of our own, and what its nodes are.

What Ray itself reports late or never is checked first, and refused with a ConfigError.
"""

from __future__ import annotations

import logging
import platform
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from sgl_batch.control_plane.instances.address_look import RAY_VERSION, check_address
from sgl_batch.control_plane.instances.host import HostEndedError
from sgl_batch.control_plane.instances.placement import Node
from sgl_batch.control_plane.instances.process_guard import ProcessGuard
from sgl_batch.control_plane.ray_environment import prepare
from sgl_batch.errors import ConfigError
from sgl_batch.installed_versions import version_of

logger = logging.getLogger(__name__)

# Messages are small, and answers lie on the disks of the nodes.
_OBJECT_STORE_BYTES = 80 << 20
_LOOK_WITHIN_S = 60.0
_REMOVED_WITHIN_S = 20.0
_LONGEST_REASON = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFacts:
    """What a look on a node found. `sgl_batch`: the version that is installed there, None where it is not."""

    cores: tuple[int, ...]
    python: str
    sgl_batch: str | None
    has_model: bool


class Cluster:
    """The cluster to which this process is connected, as one namespace of it. One object a process.

    Args:
        namespace: In which the names of instances lie.
        is_own: Whether the cluster was started here, and ends with this process.
        agents: Ends Ray's agents of a cluster of our own.
    """

    def __init__(self, namespace: str, *, is_own: bool, agents: ProcessGuard | None = None) -> None:
        self.namespace, self.is_own, self._agents = namespace, is_own, agents
        self._facts: dict[str, NodeFacts] = {}

    def nodes(self, model: str | None) -> list[Node]:
        """Return the living nodes. It blocks; nodes that were not seen before are looked at, at most a minute.

        Args:
            model: A directory that each node has to have; None: nothing is looked for.

        A node that does not answer is left out: it may be about to die, or to come.

        Raises:
            ConfigError: A node cannot run an instance, or none answers.
        """
        found, faults = self.usable(model)
        lasting = [fault for node_id, fault in faults.items() if node_id in self._facts or not found]
        if lasting:
            raise ConfigError("; ".join(lasting))
        for fault in faults.values():
            logger.warning("%s", fault)
        return found

    def usable(self, model: str | None) -> tuple[list[Node], dict[str, str]]:
        """Return the living nodes that can run an instance, and for each other one why it cannot, by its id.

        Raises HostEndedError where a cluster of our own has no node any more.
        """
        import ray
        from ray._private.state import state

        draining = state.get_draining_nodes()
        rows = {row["NodeID"]: row for row in ray.nodes() if row["Alive"]}
        if self.is_own and not rows:
            raise HostEndedError("the Ray that this server has started has ended; the server has to be started again")
        self._facts = {node_id: facts for node_id, facts in self._facts.items() if node_id in rows}
        # A node with neither cores nor GPUs is no place for instances: that of a server, say.
        rows = {node_id: row for node_id, row in rows.items() if row["Resources"].get("CPU")}
        faults = self._look([node_id for node_id in rows if node_id not in self._facts], model)
        if faults:  # a node may have died meanwhile
            alive = {row["NodeID"] for row in ray.nodes() if row["Alive"]}
            rows = {node_id: row for node_id, row in rows.items() if node_id in alive}
            faults = {node_id: fault for node_id, fault in faults.items() if node_id in alive}
        nodes = []
        for node_id, row in rows.items():
            facts = self._facts.get(node_id)
            fault = faults.get(node_id) or (fault_of(facts, model) if facts is not None else None)
            if fault is not None:
                faults[node_id] = f"node {node_name(row)} cannot run an instance: {fault}"
            elif facts is not None:
                nodes.append(as_node(row, facts, is_draining=node_id in draining))
        return nodes, faults

    def _look(self, node_ids: list[str], model: str | None) -> dict[str, str]:
        """Look at nodes, all at once. Returns what went wrong, by the node's id."""
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        task = ray.remote(num_cpus=0, max_retries=0)(_looker())
        looks = {
            node_id: task.options(
                scheduling_strategy=NodeAffinitySchedulingStrategy(node_id=node_id, soft=False)
            ).remote(model)
            for node_id in node_ids
        }
        faults = {}
        ray.wait(list(looks.values()), num_returns=len(looks), timeout=_LOOK_WITHIN_S) if looks else None
        for node_id, look in looks.items():
            try:
                self._facts[node_id] = NodeFacts(**ray.get(look, timeout=0))
            except ray.exceptions.GetTimeoutError:
                faults[node_id] = f"it has not started a task within {_LOOK_WITHIN_S:g} s"
            except ray.exceptions.RayError as error:
                faults[node_id] = f"a task on it failed: {str(error).strip().splitlines()[-1]}"
        return faults

    def remove_directory(self, node_id: str, path: str) -> None:
        """Remove a directory on a node, and the one above it once that is empty. A node that has gone is left alone."""
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        on_node = NodeAffinitySchedulingStrategy(node_id=node_id, soft=False)
        task = ray.remote(num_cpus=0, max_retries=0)(_remover()).options(scheduling_strategy=on_node)
        with suppress(ray.exceptions.RayError):
            ray.get(task.remote(path), timeout=_REMOVED_WITHIN_S)

    def close(self) -> None:
        """Leave the cluster; one of our own ends."""
        import ray

        ray.shutdown()
        if self._agents is not None:
            self._agents.close()


def connect(address: str | None, directory: Path, namespace: str) -> Cluster:
    """Join the cluster at HOST:PORT, or start one of our own with this machine as its node.

    Args:
        address: None: a cluster of our own, which ends with this process.
        directory: A private directory of this process, for the token and the files of a cluster of our own.
        namespace: As for `Cluster`.

    Raises:
        ConfigError: Ray is missing or another version, or the cluster cannot be joined.
    """
    check_ray()
    if address is None:
        prepare(directory)
    else:
        check_address(address)
    import ray

    kept: dict[str, Any] = {"namespace": namespace, "logging_level": "WARNING", "log_to_driver": False}
    started = {"include_dashboard": False, "object_store_memory": _OBJECT_STORE_BYTES}
    with _signals_kept():
        try:
            ray.init(address=address or "local", **kept, **({} if address else started))
        except Exception as error:  # Ray raises bare ones
            what = (
                f"the Ray cluster at --ray-address {address} cannot be joined" if address else "Ray cannot be started"
            )
            raise ConfigError(f"{what}: {error}") from error
    return Cluster(namespace, is_own=address is None, agents=_guarded_agents() if address is None else None)


def _guarded_agents() -> ProcessGuard | None:
    """Let Ray's agents on this machine end with this process, as its other processes do.

    By themselves they try for a minute to report the raylet's death to a cluster that has ended too.
    """
    try:
        raylets = [one for one in psutil.Process().children() if one.name() == "raylet"]
        children = [child for raylet in raylets for child in raylet.children()]
        return ProcessGuard([child.pid for child in children if is_agent(_command_of(child))])
    except (OSError, psutil.Error) as error:
        logger.warning("if this process is killed, Ray's agents will run on for a minute: %s", error)
        return None


def _command_of(process: psutil.Process) -> list[str]:
    with suppress(psutil.Error):
        return list(process.cmdline())
    return []


def is_agent(command: Sequence[str]) -> bool:
    """Return whether a raylet's child is one of its agents, by its command or its title, and no worker."""
    return any("agent" in "/".join(Path(word).parts[-2:]).lower() for word in command[:3] if not word.startswith("-"))


def check_ray() -> None:
    """Raise ConfigError where Ray is not installed here, or in another version."""
    found = version_of("ray")
    if found != RAY_VERSION:
        what = "it is not installed" if found is None else f"{found} is installed"
        raise ConfigError(f"--instances needs ray {RAY_VERSION}, and {what}: pip install 'sgl-batch[ray]'")


def as_node(row: Mapping[str, Any], facts: NodeFacts, *, is_draining: bool) -> Node:
    """Return a row of Ray's table of nodes as ours: with as many of its cores as Ray may use."""
    resources = row["Resources"]
    return Node(
        node_id=row["NodeID"],
        name=node_name(row),
        cores=facts.cores[: int(resources.get("CPU", 0))],
        gpus=int(resources.get("GPU", 0)),
        draining=is_draining,
    )


def node_name(row: Mapping[str, Any]) -> str:
    """Return a node's name for people."""
    return f"{row['NodeManagerHostname']} ({row['NodeManagerAddress']})"


def fault_of(facts: NodeFacts, model: str | None) -> str | None:
    """Return why a node cannot run an instance, or None."""
    own = version_of("sgl-batch")
    if facts.sgl_batch is None:
        return f"sgl_batch is not installed for its Python: pip install 'sgl-batch[ray]=={own}' there"
    if facts.sgl_batch != own:
        return f"it has sgl_batch {facts.sgl_batch}, and this process has {own}; install the same on all nodes"
    if facts.python != platform.python_version():
        return f"it has Python {facts.python}, and this process has {platform.python_version()}"
    if model is not None and not facts.has_model:
        return f"it has no {model}: put the model into the same directory on each node, or on a disk that they share"
    return None


def _looker() -> Callable[[str | None], dict[str, Any]]:
    """Return the task that looks at a node. Ray sends its code: the node may not have this package."""

    def look(model: str | None) -> dict[str, Any]:
        import os
        import platform
        from importlib import metadata, util

        try:
            version = metadata.version("sgl-batch") if util.find_spec("sgl_batch") else None
        except metadata.PackageNotFoundError:
            version = None
        return {
            "cores": tuple(sorted(os.sched_getaffinity(0))),
            "python": platform.python_version(),
            "sgl_batch": version,
            "has_model": model is None or os.path.isdir(model),
        }

    return look


def _remover() -> Callable[[str], None]:
    def remove(path: str) -> None:
        import os
        import shutil
        from contextlib import suppress

        shutil.rmtree(path, ignore_errors=True)
        with suppress(OSError):
            os.rmdir(os.path.dirname(path))

    return remove


@contextmanager
def _signals_kept() -> Iterator[None]:
    """Restore the handler of SIGTERM, which Ray replaces with its own."""
    before = {one: signal.getsignal(one) for one in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for one, handler in before.items():
            if handler is not None:
                signal.signal(one, handler)
