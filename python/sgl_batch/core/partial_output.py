"""Owns the first tokens of an answer that is not complete yet. Whether they are continued is decided elsewhere."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

_TYPE = "i"


class TokenBudget:
    """The number of tokens that the partial outputs which share it may still take together."""

    def __init__(self, num_tokens: int) -> None:
        self.left = num_tokens


class PartialOutput:
    """The first tokens of one answer, limited by `budget` if there is one.

    Any number of first tokens is a valid partial output, so one may be cut at any time.
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
        """The tokens; read only."""
        return self._tokens

    def pack(self) -> bytes:
        """Return the tokens as bytes, for another process of this machine (`unpack`)."""
        return self._tokens.tobytes()

    def put(self, start: int, tokens: Sequence[int]) -> None:
        """Replace all tokens from position `start` on with `tokens`.

        Tokens beyond the budget are left out, tokens that begin after a gap are too, and a closed one takes none.
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
        """Keep at most `num_tokens` tokens."""
        if self._budget is not None:
            self._budget.left += max(0, len(self) - num_tokens)
        del self._tokens[num_tokens:]
        self._num_taken = min(self._num_taken, num_tokens)
        self._has_update = True

    def close(self) -> None:
        """Drop all tokens for good: it is empty from now on and takes none."""
        self.cut(0)
        self._is_closed = True

    def take_update(self) -> tuple[int, bytes] | None:
        """Return the start and the packed tokens that have changed since the last call, or None if none have.

        `put` with them brings a copy up to date that has taken all updates before.
        """
        if not self._has_update:
            return None
        start, self._num_taken, self._has_update = self._num_taken, len(self), False
        return start, self._tokens[start:].tobytes()


def unpack(packed: bytes) -> Sequence[int]:
    """Return the tokens of `pack` or `take_update`."""
    return array(_TYPE, packed)
