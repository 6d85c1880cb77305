"""The interface of admission policies: for how many output tokens a sequence reserves pages when it is admitted.

Under a policy that `grows`, a sequence may reserve less than its whole need, and is
extended at boundaries (core/growth).
"""

from __future__ import annotations

import math
from typing import Protocol

from sgl_batch.core.length_forecast import LengthForecast
from sgl_batch.core.sequence import SequenceState


class AdmissionPolicy(Protocol):
    """How much a sequence reserves at its admission.

    `name`: the value of `--admission`. `grows`: whether a reservation may be less than the whole need.
    """

    name: str
    grows: bool

    def expected_tokens(self, sequence: SequenceState) -> int:
        """Return for how many output tokens a queued sequence is to reserve pages.

        It reserves at least the pages with which it runs to the next boundary, at most those up to `max_new_tokens`.
        """

    def finished(self, sequence: SequenceState, length: int) -> None:
        """Take in that a sequence has ended by itself after generating `length` tokens."""


class Reserve:
    """Reserve all that a sequence can ever need."""

    name = "reserve"
    grows = False

    def expected_tokens(self, sequence: SequenceState) -> int:
        return sequence.max_new_tokens

    def finished(self, sequence: SequenceState, length: int) -> None:
        """It makes no difference."""


class TwoPage:
    """Reserve the prompt and the pages of the first interval, at least two (BatchGen 5.2)."""

    name = "two-page"
    grows = True

    def expected_tokens(self, sequence: SequenceState) -> int:
        return 0

    def finished(self, sequence: SequenceState, length: int) -> None:
        """It makes no difference."""


class Forecast:
    """Reserve the mean length of the outputs that have finished; before the first, all that a sequence can need."""

    name = "forecast"
    grows = True

    def __init__(self) -> None:
        self._lengths = LengthForecast()

    def expected_tokens(self, sequence: SequenceState) -> int:
        expected = self._lengths.expected(sequence.prompt_group)
        most = sequence.max_new_tokens
        return most if expected is None else min(most, math.ceil(expected))

    def finished(self, sequence: SequenceState, length: int) -> None:
        self._lengths.finished(sequence.prompt_group, length)


class AsNoted:
    """Reserve what was noted of each sequence when it was decided: for decisions that are made again."""

    name = "as noted"
    grows = True

    def expected_tokens(self, sequence: SequenceState) -> int:
        return sequence.expected_tokens

    def finished(self, sequence: SequenceState, length: int) -> None:
        """It makes no difference."""


RESERVE = Reserve()


def make_admission(name: str, *, on_cpu: bool, exclusive_store: bool = False) -> AdmissionPolicy:
    """Return a new policy by its name, one of `config.ADMISSIONS`.

    "auto" is a forecast where that was measured to be quicker: on a CPU, and not with an exclusive store, in which
    sequences that reserve all can wait from the start.
    """
    if name == "auto":
        return Forecast() if on_cpu and not exclusive_store else RESERVE
    made: dict[str, type[Reserve | TwoPage | Forecast]] = {one.name: one for one in (Reserve, TwoPage, Forecast)}
    return made[name]()
