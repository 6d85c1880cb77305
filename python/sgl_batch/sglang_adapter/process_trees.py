"""Owns killing the processes that an engine has started. A process is identified by more than its pid, which is reused.

It replaces SGLang's kill_process_tree, which takes pids, raises if a process ends meanwhile, and waits for the end of
one tree before it kills the next: a failure leaves the rest alive.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from contextlib import suppress

import psutil

_LOOK_S = 0.01


def processes_of(pids: Iterable[int]) -> list[psutil.Process]:
    """Return the processes of these pids that run. A later process that reuses a pid is a different process."""
    found = []
    for pid in pids:
        with suppress(psutil.NoSuchProcess):
            found.append(psutil.Process(pid))
    return found


def end_trees(processes: Iterable[psutil.Process], within_s: float = 60) -> None:
    """Kill processes and all their descendants, and wait until they have ended. One that ends meanwhile is no error.

    Raises RuntimeError if any still runs after `within_s` seconds.
    """
    trees: dict[psutil.Process, None] = {}
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            trees.update(dict.fromkeys([*process.children(recursive=True), process]))
    for process in trees:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    deadline = time.monotonic() + within_s
    while running := [process.pid for process in trees if _runs(process)]:
        if time.monotonic() > deadline:
            raise RuntimeError(f"processes {running} still run {within_s} s after they were killed")
        time.sleep(_LOOK_S)


def _runs(process: psutil.Process) -> bool:
    """Return whether a process holds memory and files. A zombie waits only for its parent, which may not be ours."""
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
