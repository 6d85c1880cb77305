"""Owns how a program of ours ends its process: with its exit code, and at once. It decides no exit code."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn


def end_with(program: Callable[[], int]) -> NoReturn:
    """Run a program of ours, and end this process with its exit code and at once.

    Python's own way looks at each of the millions of objects of the libraries, for seconds, before it lets them go.
    """
    try:
        code = program()
    except SystemExit as end:
        if not isinstance(end.code, int | None):
            raise
        code = end.code or 0
    with suppress(BrokenPipeError):
        sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
