"""Owns the harness's Ray cluster: a head without cores, and nodes of one core that are killed and added."""

from __future__ import annotations

import os
import random
from typing import Any

import psutil

from kills.processes import actor_below

# A dead node is noticed within three seconds (by Ray's own values half a minute), and a slow one is not taken for dead.
_SYSTEM_CONFIG = {
    "prestart_worker_first_driver": False,
    "enable_worker_prestart": False,
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 500,
    "health_check_timeout_ms": 20000,
    "health_check_failure_threshold": 6,
}
_OBJECT_STORE_BYTES = 80 << 20


class Nodes:
    """A cluster whose nodes are processes of this machine. Each takes instances on one core of it, in turn."""

    def __init__(self, number: int) -> None:
        from ray.cluster_utils import Cluster

        self._cores = sorted(os.sched_getaffinity(0))
        self._added = 0
        head: dict[str, Any] = {"num_cpus": 0, "include_dashboard": False, "object_store_memory": _OBJECT_STORE_BYTES}
        self._cluster: Any = Cluster(initialize_head=True, head_node_args={**head, "_system_config": _SYSTEM_CONFIG})
        self.address: str = self._cluster.address
        for _ in range(number):
            self.add()

    def add(self) -> None:
        """Add a node. It need not have joined when this returns."""
        core = self._cores[self._added % len(self._cores)]
        self._added += 1
        os.sched_setaffinity(0, {core})  # what a node may use, it takes from the process that starts it
        try:
            while not self._has_added():
                print("a node was not added in time; another one is", flush=True)
        finally:
            os.sched_setaffinity(0, self._cores)

    def _has_added(self) -> bool:
        from ray.exceptions import RaySystemError

        try:
            self._cluster.add_node(wait=False, num_cpus=1, object_store_memory=_OBJECT_STORE_BYTES)
        except RaySystemError:  # the machine is busy
            return False
        return True

    def any_with_instance(self, dice: random.Random) -> Any:
        """Return a node on which an instance runs, or None."""
        nodes = [one for one in self._cluster.worker_nodes if actor_below(raylet_of(one)) is not None]
        return dice.choice(nodes) if nodes else None

    def clear_away(self, node: Any) -> None:
        """End what is left of a node whose raylet was killed."""
        self._cluster.remove_node(node, allow_graceful=False)

    def close(self) -> None:
        """End all nodes."""
        self._cluster.shutdown()


def raylet_of(node: Any) -> psutil.Process:
    """Return the process of a node's raylet."""
    return psutil.Process(node.all_processes["raylet"][0].process.pid)


def kill_raylet(node: Any) -> None:
    """Kill a node's raylet, and wait for its end."""
    process = node.all_processes["raylet"][0].process
    process.kill()
    process.wait()
