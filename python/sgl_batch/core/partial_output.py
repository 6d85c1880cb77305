"""Owns the first tokens of an answer that is not whole yet. Who goes on from them is decided elsewhere."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

_TYPE = "i"


class TokenBudget:
    """How many tokens the records that share it may still take together."""

    def __init__(self, num_tokens: int) -> None:
        self.left = num_tokens


class PartialOutput:
    """The first tokens of one answer; without a `budget` as many as there are.

    Any number of its first tokens is as good a record, only a shorter one.
    """

    def __init__(self, packed: bytes = b"", *, budget: TokenBudget | None = None) -> None:
        self._tokens = array(_TYPE, packed)
        self._budget = budget
        self._num_taken = len(self._tokens)
        self._has_update = False
        self._is_closed = False

    def __len__(self) -> int:
        return len(self._tokens)

    @property
    def tokens(self) -> Sequence[int]:
        """The tokens, to read only."""
        return self._tokens

    def pack(self) -> bytes:
        """As another process of this machine reads them."""
        return self._tokens.tobytes()

    def put(self, start: int, tokens: Sequence[int]) -> None:
        """The answer has these tokens from position `start` on; what there was behind it counts no more.

        What is beyond the budget is left out, and what follows after a gap.
        """
        if start > len(self) or self._is_closed:
            return
        self.cut(start)
        taken = tokens if self._budget is None else tokens[: self._budget.left]
        self._tokens.extend(taken)
        if self._budget is not None:
            self._budget.left -= len(taken)
        self._has_update = True

    def cut(self, num_tokens: int) -> None:
        """Keep so many tokens at most."""
        if self._budget is not None:
            self._budget.left += max(0, len(self) - num_tokens)
        del self._tokens[num_tokens:]
        self._num_taken = min(self._num_taken, num_tokens)
        self._has_update = True

    def close(self) -> None:
        """Nobody goes on from it any more: it is empty, and stays so."""
        self.cut(0)
        self._is_closed = True

    def take_update(self) -> tuple[int, bytes] | None:
        """What `put` takes, packed, to bring a record up to date that had all news before; None where there is none."""
        if not self._has_update:
            return None
        start, self._num_taken, self._has_update = self._num_taken, len(self), False
        return start, self._tokens[start:].tobytes()


def unpack(packed: bytes) -> Sequence[int]:
    """The tokens of `pack` or `take_update`."""
    return array(_TYPE, packed)
