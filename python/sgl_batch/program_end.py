"""Owns how a program of this package ends its process: at once, with its exit code."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn

INTERRUPTED = 130


def end_with(program: Callable[[], int]) -> NoReturn:
    """Run a program, and end this process at once with its exit code; 130 after Ctrl-C.

    Python's own exit would visit each of the millions of objects of the libraries first, which takes seconds.
    """
    try:
        code = program()
    except SystemExit as end:
        if not isinstance(end.code, int | None):
            raise
        code = end.code or 0
    except KeyboardInterrupt:  # of a program that has nothing else to say about it
        sys.stderr.write(f"{os.path.basename(sys.argv[0])}: interrupted\n")
        code = INTERRUPTED
    with suppress(BrokenPipeError):
        sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
