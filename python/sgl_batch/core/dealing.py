"""Decides which rank gets an arriving request: the one that has got the least work so far, by predicted tokens."""

from __future__ import annotations


class WorkDealer:
    """Deals requests to ranks. Work is tokens: those of the prompt, and those that may be generated.

    It counts what was dealt, not what is left: ranks share the steps of an instance, and migration evens out the rest.
    Of ranks with as little work the next one in turn gets the request, so that equal requests are dealt by turns.
    """

    def __init__(self, num_ranks: int) -> None:
        self._work, self._next = [0] * num_ranks, 0

    def deal(self, tokens: int) -> int:
        """Return the rank for a request with so many tokens, and count them."""
        count = len(self._work)
        turns = [(self._next + step) % count for step in range(count)]
        rank = min(turns, key=self._work.__getitem__)
        self._next = (rank + 1) % count
        self.count(rank, tokens)
        return rank

    def count(self, rank: int, tokens: int) -> None:
        """Count a request that goes to a rank for another reason."""
        self._work[rank] += tokens
