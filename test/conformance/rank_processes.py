"""Owns the dispatchers that this machine can run, and the processes of their ranks.

Processes start once for each device and number of ranks and then run functions, on all ranks at once.
"""

from __future__ import annotations

import importlib.util
import os
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

START_TIMEOUT_S = 120
ANSWER_TIMEOUT_S = 60
# Shorter, so that a rank whose peers do not come answers with an error and its stack.
GROUP_TIMEOUT = timedelta(seconds=30)


@dataclass(frozen=True, kw_only=True)
class Implementation:
    """A dispatcher by name, on the ranks `members` of `num_processes` processes."""

    name: str
    num_processes: int
    members: tuple[int, ...]

    @property
    def world_size(self) -> int:
        return len(self.members)

    @property
    def device(self) -> str:
        return "cuda" if self.name in ("nccl", "deepep") else "cpu"

    def __str__(self) -> str:
        total = "" if self.world_size == self.num_processes else f"of{self.num_processes}"
        return f"{self.name}-{self.world_size}{total}"


def _whole(name: str, world_size: int) -> Implementation:
    return Implementation(name=name, num_processes=world_size, members=tuple(range(world_size)))


def implementations() -> list[Implementation]:
    """Return the dispatchers that this machine can run. nccl and deepep need a GPU a rank; deepep needs its package."""
    found = [_whole("local", 1)]
    for name in ("shared", "gloo"):
        found += [_whole(name, size) for size in (1, 2, 4)]
        # Expert parallelism over some ranks of a larger world: ranks in the group differ from ranks in the world.
        found.append(Implementation(name=name, num_processes=4, members=(1, 2, 3)))
    found.append(_whole("staged", 2))
    found += [_whole("nccl", size) for size in (1, 2, 4) if size <= torch.cuda.device_count()]
    if importlib.util.find_spec("deep_ep") is not None:
        found += [_whole("deepep", size) for size in (2, 4) if size <= torch.cuda.device_count()]
    return found


def _serve(rank: int, world_size: int, device: str, rendezvous: str, pipe: Connection) -> None:
    """Run (function, members, arguments) from the pipe as one rank, until None comes."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl" if device == "cuda" else "gloo",
        init_method=f"file://{rendezvous}",
        rank=rank,
        world_size=world_size,
        timeout=GROUP_TIMEOUT,
    )
    groups: dict[tuple[int, ...], dist.ProcessGroup | None] = {tuple(range(world_size)): dist.group.WORLD}
    pipe.send((True, None))
    while (message := pipe.recv()) is not None:
        function, members, arguments = message
        try:
            if members not in groups:
                groups[members] = dist.new_group(list(members), timeout=GROUP_TIMEOUT)
            result = function(groups[members], *arguments) if rank in members else None
            pipe.send((True, result))
        except Exception:  # noqa: BLE001  (the parent raises it)
            pipe.send((False, traceback.format_exc()))
    dist.destroy_process_group()


class RankProcesses:
    """One process for each rank, in one process group."""

    def __init__(self, world_size: int, device: str) -> None:
        context = mp.get_context("spawn")
        self._scratch = tempfile.TemporaryDirectory(prefix="ranks-")
        rendezvous = str(Path(self._scratch.name) / "rendezvous")
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, world_size, device, rendezvous, theirs), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)
        self._started = False

    def call(self, members: Sequence[int], function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Return the result of `function(group, *arguments)` on each member, in order; raises if it failed on any."""
        if not self._started:
            self._answers(START_TIMEOUT_S)
            self._started = True
        for pipe in self._pipes:
            pipe.send((function, tuple(members), arguments))
        answers = self._answers(ANSWER_TIMEOUT_S)
        return [answers[member] for member in members]

    def _answers(self, timeout_s: float) -> list[Any]:
        deadline = time.monotonic() + timeout_s
        answers = []
        for rank, pipe in enumerate(self._pipes):
            if not pipe.poll(max(0.0, deadline - time.monotonic())):
                self.close()
                raise AssertionError(f"rank {rank} did not answer in {timeout_s} s")
            answers.append(pipe.recv())
        failures = [f"rank {rank}: {text}" for rank, (well, text) in enumerate(answers) if not well]
        assert not failures, "\n".join(failures)
        return [result for _, result in answers]

    def close(self) -> None:
        """End the processes; kill those that do not end within 10 s."""
        for pipe in self._pipes:
            try:
                pipe.send(None)
            except (BrokenPipeError, OSError):
                continue
        for process in self._processes:
            process.join(10)
            if process.is_alive():
                process.kill()
                process.join()
        self._scratch.cleanup()


class Ranks:
    """The ranks of one implementation: in processes, or for `local` in this process."""

    def __init__(self, implementation: Implementation, processes: RankProcesses | None) -> None:
        self.implementation = implementation
        self._processes = processes

    def call(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Return the result of `function(group, name, *arguments)` on each rank."""
        arguments = (self.implementation.name, *arguments)
        if self._processes is None:
            return [function(None, *arguments)]
        return self._processes.call(self.implementation.members, function, *arguments)


class ProcessCache:
    """Keeps the processes of each device and number of ranks for the implementations that share them."""

    def __init__(self) -> None:
        self._processes: dict[tuple[str, int], RankProcesses] = {}

    def ranks(self, implementation: Implementation) -> Ranks:
        """Return the ranks of an implementation; starts their processes on first use."""
        if implementation.name == "local":
            return Ranks(implementation, None)
        key = (implementation.device, implementation.num_processes)
        if key not in self._processes:
            self._processes[key] = RankProcesses(implementation.num_processes, implementation.device)
        return Ranks(implementation, self._processes[key])

    def close(self) -> None:
        """End all processes."""
        for processes in self._processes.values():
            processes.close()
