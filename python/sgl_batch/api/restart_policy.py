"""Decides whether and when an engine that has ended is started again; the clock is the caller's."""

from __future__ import annotations

import re
from dataclasses import dataclass

_FIRST_DELAY_S = 1.0
_LONGEST_DELAY_S = 60.0
# An engine that answered for so long starts afresh in our eyes.
_FIRST_MINUTE_S = 60.0
_SAME_WORDS = 3
# How much memory a killed process had, say, differs from life to life.
_NUMBER = re.compile(r"\d+(\.\d+)?")
# Lines are run again, fewer and fewer together, when an engine has died of one of them. Halving 2,048 of them to one
# takes eleven lives, of which nearly all answer something.
_FRUITLESS = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionEnd:
    """How one engine's life ended. `lived_s`: since it was ready (0: it never was); `busy`: it had lines to answer."""

    words: str
    lived_s: float
    busy: bool
    num_answered: int


class RestartPolicy:
    """Counts lives that came to nothing, one after another."""

    def __init__(self) -> None:
        self._words: str | None = None
        self._forget()

    def _forget(self) -> None:
        self._delay_s = _FIRST_DELAY_S
        self._same = self._fruitless = 0

    def delay_after(self, end: SessionEnd) -> float | None:
        """How long to wait before the next start; None: it would be no use.

        An engine that fails by itself with the same words (but for numbers) three times is not started again, nor one
        that dies again and again without a single answer. One that dies of its lines is: they are then run alone.
        """
        words = _NUMBER.sub("#", end.words)
        if end.lived_s >= _FIRST_MINUTE_S:
            self._forget()
        self._fruitless = 0 if end.num_answered else self._fruitless + 1
        if end.busy:
            self._same = 0
        else:
            self._same = self._same + 1 if words == self._words else 1
        self._words = words
        if self._same >= _SAME_WORDS or self._fruitless >= _FRUITLESS:
            return None
        delay_s = _FIRST_DELAY_S if end.num_answered else self._delay_s
        self._delay_s = min(2 * delay_s, _LONGEST_DELAY_S)
        return delay_s
