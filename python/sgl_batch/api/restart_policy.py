"""Decides whether and when an engine that has ended is started again. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass

_FIRST_DELAY_S = 1.0
_LONGEST_DELAY_S = 60.0
# After an engine that ran for so long, earlier failures do not count.
_STABLE_AFTER_S = 60.0
_SAME_MESSAGE = 3
# Numbers in a message may differ from engine to engine: the memory of a killed process, for example.
_NUMBER = re.compile(r"\d+(\.\d+)?")
# When an engine dies of one of its lines, these run again in smaller and smaller groups. Halving 2,048 lines to one
# takes eleven engines, and nearly all of them answer something.
_FRUITLESS = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionEnd:
    """How one engine ended. `lived_s`: seconds since it was ready (0: it never was); `busy`: it had lines to answer."""

    message: str
    lived_s: float
    busy: bool
    num_answered: int


class RestartPolicy:
    """Counts failures in a row."""

    def __init__(self) -> None:
        self._message: str | None = None
        self._forget()

    def _forget(self) -> None:
        self._delay_s = _FIRST_DELAY_S
        self._same = self._fruitless = 0

    def delay_after(self, end: SessionEnd) -> float | None:
        """Return how many seconds to wait before the next start, or None for no more starts.

        There are no more starts after three failures in a row with the same message (apart from numbers) while no line
        was in flight, and after twelve engines in a row without a single answer. An engine that dies of its lines is
        started again: the lines then run in smaller groups.
        """
        message = _NUMBER.sub("#", end.message)
        if end.lived_s >= _STABLE_AFTER_S:
            self._forget()
        self._fruitless = 0 if end.num_answered else self._fruitless + 1
        if end.busy:
            self._same = 0
        else:
            self._same = self._same + 1 if message == self._message else 1
        self._message = message
        if self._same >= _SAME_MESSAGE or self._fruitless >= _FRUITLESS:
            return None
        delay_s = _FIRST_DELAY_S if end.num_answered else self._delay_s
        self._delay_s = min(2 * delay_s, _LONGEST_DELAY_S)
        return delay_s
