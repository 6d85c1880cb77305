"""Owns the environment in which this package starts Ray: access by a token of our own, short names, no reports home.

Whoever joins a cluster that others have started needs none of it.
"""

from __future__ import annotations

import os
import secrets
import sys
from pathlib import Path

from sgl_batch.errors import ConfigError

_MODE, _TOKEN, _TOKEN_PATH, _TMPDIR = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_TMPDIR"
# No reports home; and Ray would run its workers, with our engines in them, at nice 15. What Ray would measure for its
# dashboard, which is not started, costs a percent of a core.
_SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",
    "RAY_event_stats": "0",
    "RAY_task_events_report_interval_ms": "0",
    "RAY_enable_metrics_collection": "0",
}
# What Ray appends to the directory for its sockets. The kernel takes 107 characters.
_LONGEST_SOCKET = "/ray/session_2026-01-01_00-00-00_000000_4194304/sockets/plasma_store.99"
LONGEST_DIRECTORY = 107 - len(_LONGEST_SOCKET)


def prepare(directory: Path) -> dict[str, str]:
    """Set the variables of a cluster that this process starts, and return them for processes that are to join it.

    Ray would write its token into the user's home. Here it is a file in `directory` (mode 0600), and so are Ray's
    sessions and logs. What the user has set for Ray's access stays. Ray keeps a token that it has read, so further
    calls of one process keep the first directory too.

    Args:
        directory: A private directory of this process, which the caller removes after Ray has ended.

    Raises:
        ConfigError: The directory's name is too long for sockets in it.
    """
    if _MODE not in os.environ:
        os.environ[_MODE] = "token"
        if "ray._raylet" in sys.modules:  # it read its variables when it was imported; Ray itself does this too
            sys.modules["ray._raylet"].Config.initialize("")
        if _TOKEN not in os.environ and _TOKEN_PATH not in os.environ:
            os.environ[_TOKEN_PATH] = str(_new_token(directory))
    if _TMPDIR not in os.environ:
        _check_length(directory)
        os.environ[_TMPDIR] = str(directory)
    for name, value in _SETTINGS.items():
        os.environ.setdefault(name, value)
    names = (_MODE, _TOKEN, _TOKEN_PATH, _TMPDIR, *_SETTINGS)
    return {name: os.environ[name] for name in names if name in os.environ}


def _new_token(directory: Path) -> Path:
    path = directory / "ray_token"
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(secrets.token_hex(32))
    return path


def _check_length(directory: Path) -> None:
    if len(str(directory)) > LONGEST_DIRECTORY:
        raise ConfigError(
            f"the directory of temporary files {directory} has a name of {len(str(directory))} characters, too long "
            f"for Ray's sockets in it: set TMPDIR so that it has at most {LONGEST_DIRECTORY}"
        )
