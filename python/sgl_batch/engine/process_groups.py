"""Waits until no process of a group runs."""

from __future__ import annotations

import asyncio
import os
import time
from contextlib import suppress

import psutil

_LOOK_EVERY_S = 0.02


async def group_ended(group: int, within_s: float) -> list[int]:
    """Wait until no process of a group runs. Return those that still run after `within_s` seconds.

    A killed process runs until the kernel has freed its memory. A zombie does not count: it only waits for its parent,
    which may not be a process of ours.
    """
    deadline = time.monotonic() + within_s
    while running := _running(group):
        if time.monotonic() > deadline:
            return running
        await asyncio.sleep(_LOOK_EVERY_S)
    return []


def _running(group: int) -> list[int]:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return []
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.NoSuchProcess, ProcessLookupError):
            if os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
    return found
