"""Owns how a fault in SGLang's code is put into words, and the place where its process functions meet one.

It imports no SGLang, and decides nothing about what follows from a fault.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

_LONGEST_TEXT = 600


def error_text(error: BaseException) -> str:
    """What SGLang's error says, on one line; of an assertion without words, what it asserts and where."""
    words = " ".join(str(error).split())
    frames = traceback.extract_tb(error.__traceback__)
    if not words and frames:
        words = f"{frames[-1].line} ({Path(frames[-1].filename).name}:{frames[-1].lineno})"
    return words if len(words) <= _LONGEST_TEXT else f"{words[:_LONGEST_TEXT]} ..."


def ending_by(end: Callable[[Exception], NoReturn]) -> Callable[[], NoReturn]:
    """What stands in place of `get_exception_traceback`, which a process function calls first when it handles a fault.

    `end(error)` ends the process; SGLang would print the traceback and send the parent a signal.
    """

    def end_by_current() -> NoReturn:
        error = sys.exception()
        assert isinstance(error, Exception), "a fault is being handled"
        end(error)

    return end_by_current
