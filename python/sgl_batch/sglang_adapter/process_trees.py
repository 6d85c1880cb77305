"""Owns the end of processes that an engine has started. Each is known by more than its number, which can be reused.

SGLang's kill_process_tree takes numbers, raises where a process goes away as it looks, and waits for the end of one
tree before the next is killed: what fails there leaves the rest alive.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from contextlib import suppress

import psutil

_LOOK_S = 0.01


def processes_of(pids: Iterable[int]) -> list[psutil.Process]:
    """Those that run, as what they are now: a later process with the number of one that has ended is another one."""
    found = []
    for pid in pids:
        with suppress(psutil.NoSuchProcess):
            found.append(psutil.Process(pid))
    return found


def end_trees(processes: Iterable[psutil.Process], within_s: float = 60) -> None:
    """Kill processes and all that these have started, and wait for their ends. One that ends meanwhile is no error.

    Raises RuntimeError where any still runs after `within_s` seconds.
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
    """Whether it holds memory and files. A zombie only waits for its parent, which may be none of ours."""
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
