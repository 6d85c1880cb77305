"""Owns the lock of a folder of outcomes: the second of two calls with one folder is refused."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class FolderHeld(Exception):  # noqa: N818 (a name that says what has happened)
    """Another call has the folder's lock."""


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Hold the folder's lock inside; make the folder if needed. Raises FolderHeld if another call holds it.

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
