"""Owns the kills of a server with one engine: its processes at random moments, and its front at failpoints."""

from __future__ import annotations

import random
import statistics
import time
from collections import defaultdict

import psutil

from kills.server_process import ServerProcess
from sgl_batch.jobs.failpoints import failpoint_names

PROCESSES = ("front", "host", "scheduler", "detokenizer")


class OneEngine:
    """Kills processes of a server with one engine, waits until the server is ready again, and keeps the seconds."""

    def __init__(self, server: ServerProcess, dice: random.Random, pause_s: float) -> None:
        self.ready_s: defaultdict[str, list[float]] = defaultdict(list)
        self.not_reached: list[str] = []
        self._server, self._dice, self._pause_s = server, dice, pause_s

    def kill_all(self, kills: int, end_s: float, *, failpoints: bool) -> None:
        """Kill in random order: processes in turns, failpoints between them. Nothing after `end_s`."""
        wanted: list[tuple[str, str]] = [("process", PROCESSES[number % len(PROCESSES)]) for number in range(kills)]
        if failpoints:
            wanted += [("failpoint", name) for name in failpoint_names()]
        self._dice.shuffle(wanted)
        for number, (kind, name) in enumerate(wanted):
            if time.monotonic() > end_s:
                print(f"the time is over after {number} of {len(wanted)} kills", flush=True)
                return
            (self.kill_at if kind == "failpoint" else self.kill_one)(name)
            if number % 10 == 9:
                print(f"{number + 1} kills", flush=True)

    def report(self) -> None:
        """Print the table."""
        print("\n| killed | times | ready again after, s: median (least-most) |\n| --- | ---: | ---: |")
        for name, found in sorted(self.ready_s.items()):
            print(f"| {name} | {len(found)} | {statistics.median(found):.1f} ({min(found):.1f}-{max(found):.1f}) |")
        if self.not_reached:
            print(f"failpoints not reached in time: {', '.join(self.not_reached)}")

    def kill_one(self, name: str) -> None:
        """Kill a process at a random moment of the engine's work."""
        time.sleep(self._dice.uniform(0, self._pause_s))
        if not self.kill(name):
            return
        begun = time.monotonic()
        if name == "front":
            self._server.start()
        else:
            while self._server.is_ready():  # the server notices a dead engine after a moment
                time.sleep(0.02)
        self._server.until_ready()
        self.ready_s[name].append(time.monotonic() - begun)

    def kill_at(self, failpoint: str) -> None:
        """Let the front die at a failpoint, and start it again without a failpoint."""
        self.kill_front()
        self._server.start(f"{failpoint}:{self._dice.randrange(1, 4)}")
        deadline, is_engine_killed = time.monotonic() + 45, False
        while not self._server.has_ended() and time.monotonic() < deadline:
            if failpoint.startswith("suspects") and not is_engine_killed and self._server.is_ready():
                is_engine_killed = self.kill("scheduler")
            time.sleep(0.05)
        if not self._server.has_ended():
            self.not_reached.append(failpoint)
        self.kill_front()
        begun = time.monotonic()
        self._server.start()
        self._server.until_ready()
        self.ready_s["failpoint" if failpoint not in self.not_reached else "front"].append(time.monotonic() - begun)

    def find(self, name: str) -> psutil.Process | None:
        """Return one of PROCESSES, or None if it does not run."""
        try:
            front = self._server.process
            if name == "front":
                return front
            hosts = front.children()
            if name == "host":
                return hosts[0] if hosts else None
            below = [one for host in hosts for one in host.children(recursive=True)]
            return next((one for one in below if name in " ".join(one.cmdline())), None)
        except psutil.Error:
            return None

    def kill(self, name: str) -> bool:
        """Kill a process; with the front, all others end. Return whether it ran."""
        found = self.find(name)
        if found is None:
            return False
        if name == "front":
            self.kill_front()
        else:
            found.kill()
            psutil.wait_procs([found], timeout=30)
        return True

    def kill_front(self) -> None:
        """Kill the front if it runs, and wait until all its processes are gone."""
        try:
            tree = self._server.process.children(recursive=True)
        except psutil.Error:
            tree = []
        self._server.kill()
        _, left = psutil.wait_procs(tree, timeout=60)
        assert not left, f"the engine outlived its server: {left}"
