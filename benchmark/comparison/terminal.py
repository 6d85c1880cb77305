"""Owns what a command of this folder says to a person at a terminal: progress, and faults without a traceback."""

from __future__ import annotations

import sys
from collections.abc import Callable
from datetime import datetime

from sgl_batch.errors import ConfigError


def say(text: str) -> None:
    """Progress, for a person."""
    print(f"{datetime.now():%H:%M:%S} {text}", file=sys.stderr, flush=True)


def exit_code(program: str, work: Callable[[], int]) -> int:
    """What `work` returns; a user's fault ends it with one line and 1."""
    try:
        return work()
    except ConfigError as error:
        print(f"{program}: {error}", file=sys.stderr)
    except OSError as error:
        print(f"{program}: {error.filename or 'a file'}: {error.strerror}", file=sys.stderr)
    return 1
