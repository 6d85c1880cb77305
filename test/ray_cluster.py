"""Owns the environment of a test's own Ray: quick to start, and to notice a death; nothing in the user's home.

Ray reads its environment when it is imported, so that a program with Ray is a process of its own.
"""

from __future__ import annotations

import os
import secrets
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

SYSTEM_CONFIG = {
    "prestart_worker_first_driver": False,
    "enable_worker_prestart": False,
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 500,
    "health_check_timeout_ms": 2000,
    "health_check_failure_threshold": 4,
}


@contextmanager
def ray_environment(repo_root: Path) -> Iterator[dict[str, str]]:
    """Yield the environment of a program that starts Ray; at the end, end the processes that still have it.

    Ray's directory has a short name, because sockets in it have names of at most 107 characters.
    """
    with tempfile.TemporaryDirectory(prefix="rd", dir="/tmp", ignore_cleanup_errors=True) as directory:
        token = Path(directory) / "token"
        token.touch(mode=0o600)
        token.write_text(secrets.token_hex(32), encoding="ascii")
        environment = {
            **os.environ,
            "HOME": directory,
            "PYTHONPATH": os.pathsep.join(str(repo_root / folder) for folder in ("python", "test")),
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(token),
            "RAY_TMPDIR": directory,
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_DATA_DISABLE_PROGRESS_BARS": "1",
        }
        try:
            yield environment
        finally:
            for process in processes_in(directory):
                process.kill()


def processes_in(directory: str) -> list[psutil.Process]:
    """Return the processes of the Ray whose directory this is: its own, and those of its actors and engines."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("RAY_TMPDIR") == directory:
                found.append(process)
        except psutil.Error:
            continue
    return found


def left_after(directory: str, within_s: float) -> list[str]:
    """Return the command lines of processes that are still there after `within_s` seconds."""
    until = time.monotonic() + within_s
    while (left := processes_in(directory)) and time.monotonic() < until:
        time.sleep(0.1)
    names = []
    for process in left:
        try:
            names.append(" ".join(process.cmdline()))
        except psutil.Error:
            continue
    return names
