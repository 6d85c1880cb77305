"""Owns the interface of order policies, which decide which queued sequences are prefilled next.

One policy object orders the queue of one rank (core/sequence_queue owns both). Admission reads sequences from `take`
and stops at the first that does not fit, so the first sequence of the order can block all others. Optional abilities
(lines in advance, ranks, kept prefixes) are in `abilities`.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

from sgl_batch.core.sequence import SequenceState


class Side(enum.Enum):
    """The end of its order from which a policy takes a sequence; a policy with one end uses HEAD only."""

    HEAD = "head"
    TAIL = "tail"


@dataclass(frozen=True, slots=True, kw_only=True)
class Budgets:
    """What the next prefill group may take: `tokens` to compute, and `pages` in the account of admission."""

    tokens: int
    pages: int


class OrderPolicy(Protocol):
    """Orders queued sequences.

    A sequence is offered, read by `take` any number of times, and dropped; one that is retracted later is offered
    again. The cost of a call depends on what it changes or reads, not on the length of the queue. Policies are
    deterministic: the same calls give the same order.
    """

    def offer(self, sequences: Iterable[SequenceState]) -> None:
        """Queue sequences.

        Args:
            sequences: new sequences in order of arrival, each with an id that is not queued. The policy may keep the
                objects until `drop`; their prompt and most output do not change while they are queued. `shared_tokens`
                may change.
        """

    def take(self, budgets: Budgets) -> Iterator[tuple[SequenceState, Side]]:
        """Return the queued sequences in the order in which they are to be prefilled.

        This removes nothing: the caller drops the sequences that it prefills. A sequence that does not fit blocks those
        after it. No sequence may stay behind for ever while later ones overtake it.

        Args:
            budgets: what the next group may take. A policy may use it to pick sequences that fit together; it need not
                enforce it.

        Returns:
            Every queued sequence once, each with the end of the order that it is from. The caller reads as many as it
            needs, and does not call `offer` or `drop` while it reads.
        """

    def drop(self, sequence_id: str) -> None:
        """Remove a queued sequence: it is prefilled, aborted, or has moved to another rank.

        Raises:
            KeyError: no such sequence is queued.
        """

    def finished(self, sequence: SequenceState, length: int) -> None:
        """Note that a prefilled sequence has ended after generating `length` tokens.

        A policy that predicts lengths may learn from it. With several ranks, the sequence may have been queued on
        another one.
        """
