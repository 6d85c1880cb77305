"""Longest first: the sequences that can take longest are prefilled first, so that no long one is left at the end.

A bounded number of later sequences may overtake a sequence; then it is the next, whatever its length.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator

from sgl_batch.core.order.interface import Budgets, Side
from sgl_batch.core.sequence import SequenceState

MOST_LATER = 8192  # later arrivals after which a sequence is the next


class LongestFirst:
    """Orders sequences by prompt and most output tokens together, the longest first, and equals by arrival.

    The choices of a request have the same length, so that their leader, which arrives first, comes first.
    """

    def __init__(self, most_later: int = MOST_LATER) -> None:
        self._most_later = most_later
        self._by_length: list[tuple[int, int, str]] = []
        self._queued: dict[str, SequenceState] = {}  # in order of arrival
        self._last_arrival = 0

    def offer(self, sequences: Iterable[SequenceState]) -> None:
        for sequence in sequences:
            self._queued[sequence.sequence_id] = sequence
            insort(self._by_length, _key(sequence))
            self._last_arrival = max(self._last_arrival, sequence.arrival)

    def take(self, budgets: Budgets) -> Iterator[tuple[SequenceState, Side]]:
        overdue: set[str] = set()
        for sequence in self._queued.values():
            if self._last_arrival - sequence.arrival <= self._most_later:
                break
            overdue.add(sequence.sequence_id)
            yield sequence, Side.HEAD
        for _, _, name in self._by_length:
            if name not in overdue:
                yield self._queued[name], Side.HEAD

    def drop(self, sequence_id: str) -> None:
        key = _key(self._queued.pop(sequence_id))
        del self._by_length[bisect_left(self._by_length, key)]

    def finished(self, sequence: SequenceState, length: int) -> None:
        """Do nothing: the order depends on the most tokens only, not on actual lengths."""


def _key(sequence: SequenceState) -> tuple[int, int, str]:
    return -(sequence.prompt_tokens + sequence.max_new_tokens), sequence.arrival, sequence.sequence_id
