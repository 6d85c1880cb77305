"""Owns a call's hold on a folder of outcomes: of two calls on one, the second is refused."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class FolderHeld(Exception):  # noqa: N818 (a name that says what has happened)
    """Another call works on the folder."""


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Inside, no other call holds the folder, which is made if need be. Raises FolderHeld where one does.

    The kernel lets go of the lock with the process that has it; the empty file `lock` stays.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise FolderHeld(
                f"{folder} is held by another call of scripts/gpu_bringup, which works on it now: wait for its end, or "
                "name another folder with --out"
            ) from error
        yield
