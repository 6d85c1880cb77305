"""Owns the kills of a server with several instances: of actors, nodes, engines, and of the server itself."""

from __future__ import annotations

import json
import random
import shutil
import statistics
import tempfile
import time
from collections import Counter, defaultdict
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import psutil

from kills.lines import Findings
from kills.nodes import Nodes, kill_raylet, raylet_of
from kills.processes import (
    ENGINE_PARTS,
    WITHIN_S,
    actors,
    below,
    end_rest,
    engine_processes,
    hosts_below,
    is_instance,
    outlived,
    part_of,
)
from kills.server_process import READY_WITHIN_S, ServerProcess

ADMIN_KEY = "admin"
# "disk": a node is lost with its disk, and the answers on it that were not committed.
NODE_KINDS = ("raylet", "disk")
KINDS = ("actor", *NODE_KINDS, *ENGINE_PARTS, "server")
_LONGEST_NEW_NODE_S = 8.0
Rows = dict[str, tuple[int, int, str]]


class Instances:
    """A server with `count` instances on a cluster of the harness, and what its kills gave.

    Args:
        server: Runs on that cluster.
        nodes: Of that cluster.
        jobs_dir: Of the server.
        overlap: The share of kills after which the next one does not wait until all instances are ready.
    """

    def __init__(
        self,
        server: ServerProcess,
        nodes: Nodes,
        jobs_dir: Path,
        count: int,
        dice: random.Random,
        pause_s: float,
        overlap: float,
        findings: Findings,
    ) -> None:
        self._server, self._nodes, self._jobs_dir, self._count = server, nodes, jobs_dir, count
        self._dice, self._pause_s, self._overlap, self._findings = dice, pause_s, overlap, findings
        self._kills: Counter[str] = Counter()
        self._recovered_s: defaultdict[str, list[float]] = defaultdict(list)
        self.orphans: list[str] = []
        self._dead_nodes: list[Any] = []
        self._is_quiet = True  # all instances were ready before the kill

    def rows(self) -> Rows:
        """Return incarnation, restarts and phase of each instance; none where the server does not answer."""
        try:
            headers = {"Authorization": f"Bearer {ADMIN_KEY}"}
            data = httpx.get(f"{self._server.url}/v1/sgl_batch/instances", headers=headers, timeout=5).json()["data"]
        except (httpx.HTTPError, ValueError, KeyError):
            return {}
        return {one["name"]: (one["incarnation"], one["restarts"], one["phase"]) for one in data}

    def until_all_ready(self, before: Rows | None = None) -> bool:
        """Wait until all instances are ready, and differ from `before`. Return whether they are in time."""
        deadline, changed = time.monotonic() + READY_WITHIN_S, before is None
        while time.monotonic() < deadline:
            rows = self.rows()
            changed = changed or bool(rows and rows != before)
            if changed and len(rows) == self._count and all(row[2] == "ready" for row in rows.values()):
                return True
            if self._server.has_ended():
                self._findings.faults.append("the server ended by itself")
                self._server.start()
            time.sleep(0.05)
        self._findings.faults.append(f"the instances are not ready after {READY_WITHIN_S} s: {self.rows()}")
        return False

    def kill_all(self, kills: int, end_s: float) -> None:
        """Kill each of KINDS in turn, in random order, until there are so many kills. Nothing after `end_s`."""
        kinds = [KINDS[number % len(KINDS)] for number in range(kills)]
        self._dice.shuffle(kinds)
        for number, kind in enumerate(kinds):
            if time.monotonic() > end_s:
                print(f"the time is over after {number} of {kills} kills", flush=True)
                break
            is_last = number == kills - 1
            self._kill_one(kind, waits=is_last or self._dice.random() >= self._overlap)
            faults = [*self._findings.faults, *self.orphans]
            what = f": {faults[-1][:200]}" if faults else ""
            print(f"{number + 1:4d} {kind}, faults so far: {len(faults)}{what}", flush=True)
        self.until_all_ready()
        self._check_number()

    def _kill_one(self, kind: str, *, waits: bool) -> None:
        time.sleep(self._dice.uniform(0, self._pause_s))
        deadline = time.monotonic() + READY_WITHIN_S
        while True:
            before, began = self.rows(), time.monotonic()
            tree = self._kill(kind)
            if tree is not None:
                break
            if began > deadline:
                self._findings.faults.append(f"there was no {kind} to kill for {READY_WITHIN_S} s")
                return
            time.sleep(0.2)
        self._kills[kind] += 1
        self.orphans += [f"after {kind}: {one}" for one in outlived(tree)]
        self._make_good(kind)
        was_quiet, self._is_quiet = self._is_quiet, False
        if waits and self.until_all_ready(None if kind == "server" else before):
            self._is_quiet = True
            if was_quiet:
                self._recovered_s[kind].append(time.monotonic() - began)
            self._check_number()

    def _kill(self, kind: str) -> list[psutil.Process] | None:
        """Kill a process of this kind. Return what has to end with it, or None where there is none to kill."""
        if kind == "server":
            tree = below(self._server.process)  # instances are not below it, unless the cluster is its own
            self._server.kill()
            return tree
        if kind in NODE_KINDS:
            return self._kill_raylet(kind)
        running = actors()
        actor = self._dice.choice(running) if running else None
        found = actor if actor is None or kind == "actor" else part_of(actor, kind)
        if found is None:
            return None
        tree = below(found)
        with suppress(psutil.NoSuchProcess):
            found.kill()
            return [found, *tree]
        return None

    def _kill_raylet(self, kind: str) -> list[psutil.Process] | None:
        node = self._nodes.any_with_instance(self._dice)
        if node is None:
            return None
        instances = [one for one in below(raylet_of(node)) if is_instance(one)]
        name = next((name for name, place in self._places().items() if place == node.node_id), None)
        kill_raylet(node)
        if kind == "disk" and name is not None:
            psutil.wait_procs(instances, timeout=2)
            shutil.rmtree(self._directory(name), ignore_errors=True)
        self._dead_nodes.append(node)
        return instances

    def _make_good(self, kind: str) -> None:
        """Start the server again, or add a node after a while."""
        if kind == "server":
            self._server.start()
        if kind in NODE_KINDS:
            time.sleep(self._dice.uniform(0, _LONGEST_NEW_NODE_S))
            for node in self._dead_nodes:
                self._nodes.clear_away(node)
            self._dead_nodes.clear()
            self._nodes.add()

    def _places(self) -> dict[str, str]:
        """Return on which node each instance is, as the server has noted it."""
        rows = json.loads((self._jobs_dir / "instances.json").read_text())["instances"]
        return {name: row["place"]["node_id"] for name, row in rows.items() if row.get("place")}

    def _directory(self, name: str) -> Path:
        service = json.loads((self._jobs_dir / "instances.json").read_text())["service"]
        return Path(tempfile.gettempdir()) / f"sgl_batch_{service}" / name

    def _check_number(self) -> None:
        """Note instances and engines that nobody uses: there are as many as there are to be."""
        deadline = time.monotonic() + WITHIN_S
        while True:
            engines = [len(hosts_below(one)) for one in actors()]
            if engines == [1] * self._count:
                return
            if time.monotonic() > deadline:
                self._findings.faults.append(f"the processes of instances have so many engines: {engines}")
                return
            time.sleep(0.2)

    def check_end(self) -> None:
        """Note what outlives the cluster; end all that is left of it."""
        self.orphans += [f"after the cluster: {one}" for one in outlived(engine_processes())]
        end_rest()

    def report(self) -> None:
        """Print the table."""
        print("\n| killed | times | all instances ready again after, s: median (worst) |\n| --- | ---: | ---: |")
        for kind, number in sorted(self._kills.items()):
            found = self._recovered_s[kind]
            seconds = f"{statistics.median(found):.1f} ({max(found):.1f}), {len(found)} times" if found else "-"
            print(f"| {kind} | {number} | {seconds} |")
        print(f"\nkills: {self._kills.total()}; processes that outlived theirs by {WITHIN_S:g} s: {len(self.orphans)}")
        for one in self.orphans[:20]:
            print(f"  {one}")
