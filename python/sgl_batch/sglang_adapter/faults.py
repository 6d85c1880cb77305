"""Owns the text of an error in SGLang's code, and the hook where SGLang's process functions handle one.

It does not import SGLang.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

_LONGEST_TEXT = 600


def error_text(error: BaseException) -> str:
    """Return an error's message on one line; for an assertion without a message, its expression and source line."""
    words = " ".join(str(error).split())
    frames = traceback.extract_tb(error.__traceback__)
    if not words and frames:
        words = f"{frames[-1].line} ({Path(frames[-1].filename).name}:{frames[-1].lineno})"
    return words if len(words) <= _LONGEST_TEXT else f"{words[:_LONGEST_TEXT]} ..."


def ending_by(end: Callable[[Exception], NoReturn]) -> Callable[[], NoReturn]:
    """Return a replacement for SGLang's `get_exception_traceback`, which process functions call first on an error.

    The replacement calls `end(error)`, which ends the process. SGLang would print the traceback and send a signal to
    the parent process.
    """

    def end_by_current() -> NoReturn:
        error = sys.exception()
        assert isinstance(error, Exception), "a fault is being handled"
        end(error)

    return end_by_current
