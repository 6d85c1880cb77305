"""Owns the lengths of the outputs of a run that have ended, of all ranks, and their mean above a length.

Adding and asking take a time that grows with the logarithm of the longest output: two Fenwick trees over the lengths.
"""

from __future__ import annotations

from collections.abc import Iterable


class EndedLengths:
    """Lengths in tokens, each at least 0."""

    __slots__ = ("_counts", "_tokens")

    def __init__(self, lengths: Iterable[int] = ()) -> None:
        # Node i > 0 holds the sum over lengths (i - (i & -i), i], counted from 1, so that the last holds all.
        self._counts, self._tokens = [0, 0], [0, 0]
        for length in lengths:
            self.add(length)

    def __len__(self) -> int:
        return self._counts[-1]

    def add(self, length: int) -> None:
        """Take in the length of one more output."""
        while length + 1 >= len(self._counts):
            self._double()
        node = length + 1
        while node < len(self._counts):
            self._counts[node] += 1
            self._tokens[node] += length
            node += node & -node

    def mean_above(self, length: int) -> float | None:
        """Return the mean of the lengths above `length`; None if there is none."""
        count, tokens = self._counts[-1], self._tokens[-1]
        node = min(length + 1, len(self._counts) - 1)
        while node > 0:
            count -= self._counts[node]
            tokens -= self._tokens[node]
            node -= node & -node
        return tokens / count if count else None

    def _double(self) -> None:
        for tree in (self._counts, self._tokens):
            more = len(tree) - 1
            tree += [0] * (more - 1) + [tree[-1]]
