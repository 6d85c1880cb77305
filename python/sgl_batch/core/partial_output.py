"""Owns the first tokens of an answer that is not whole yet. Who goes on from them is decided elsewhere."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

_TYPE = "i"


class TokenRoom:
    """How many tokens the records that share it may still take together."""

    def __init__(self, num_tokens: int) -> None:
        self.left = num_tokens


class PartialOutput:
    """The first tokens of one answer; without a `room` as many as there are.

    Any number of its first tokens is as good a record, only a shorter one.
    """

    def __init__(self, packed: bytes = b"", *, room: TokenRoom | None = None) -> None:
        self._tokens = array(_TYPE, packed)
        self._room = room
        self._num_told = len(self._tokens)
        self._has_news = False
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

        What is beyond the room is left out, and what follows after a gap.
        """
        if start > len(self) or self._is_closed:
            return
        self.cut(start)
        taken = tokens if self._room is None else tokens[: self._room.left]
        self._tokens.extend(taken)
        if self._room is not None:
            self._room.left -= len(taken)
        self._has_news = True

    def cut(self, num_tokens: int) -> None:
        """Keep so many tokens at most."""
        if self._room is not None:
            self._room.left += max(0, len(self) - num_tokens)
        del self._tokens[num_tokens:]
        self._num_told = min(self._num_told, num_tokens)
        self._has_news = True

    def close(self) -> None:
        """Nobody goes on from it any more: it is empty, and stays so."""
        self.cut(0)
        self._is_closed = True

    def news(self) -> tuple[int, bytes] | None:
        """What `put` takes, packed, to bring a record up to date that had all news before; None where there is none."""
        if not self._has_news:
            return None
        start, self._num_told, self._has_news = self._num_told, len(self), False
        return start, self._tokens[start:].tobytes()


def unpack(packed: bytes) -> Sequence[int]:
    """The tokens of `pack` or `news`."""
    return array(_TYPE, packed)
