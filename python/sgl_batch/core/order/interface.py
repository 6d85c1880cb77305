"""The interface of order policies: which queued sequences are prefilled next."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

from sgl_batch.core.sequence import SequenceState


class Side(enum.Enum):
    """From which end of its order a policy takes a sequence; one with a single end has the head alone."""

    HEAD = "head"
    TAIL = "tail"


@dataclass(frozen=True, slots=True, kw_only=True)
class Budgets:
    """What there is to give out: `tokens` of a prefill group, and `pages` in the account of admission."""

    tokens: int
    pages: int


class OrderPolicy(Protocol):
    """Keeps queued sequences in its order. Each call costs by what it changes, whatever the length of the queue."""

    def offer(self, sequences: Iterable[SequenceState]) -> None:
        """These sequences are queued from now on, in order of arrival."""

    def take(self, budgets: Budgets) -> Iterator[tuple[SequenceState, Side]]:
        """Queued sequences in the order in which they are to be prefilled, as far as the caller reads.

        Reading removes nothing: sequences that are prefilled are dropped. What does not fit blocks what comes behind.
        """

    def drop(self, sequence_id: str) -> None:
        """A sequence is queued no longer: it is prefilled, has ended, or has gone."""

    def finished(self, sequence: SequenceState, length: int) -> None:
        """A sequence that was queued here has ended after generating `length` tokens."""
