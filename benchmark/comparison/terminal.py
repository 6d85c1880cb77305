"""Owns the terminal output of this folder's commands: progress, and user errors without a traceback."""

from __future__ import annotations

import sys
from collections.abc import Callable
from datetime import datetime

from sgl_batch.errors import ConfigError


def say(text: str) -> None:
    """Print progress for the user."""
    print(f"{datetime.now():%H:%M:%S} {text}", file=sys.stderr, flush=True)


def exit_code(program: str, work: Callable[[], int]) -> int:
    """Return the result of `work`; a user's error prints one line and returns 1."""
    try:
        return work()
    except ConfigError as error:
        print(f"{program}: {error}", file=sys.stderr)
    except OSError as error:
        print(f"{program}: {error.filename or 'a file'}: {error.strerror}", file=sys.stderr)
    return 1
