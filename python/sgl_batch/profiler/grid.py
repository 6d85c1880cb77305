"""Decides which sizes of groups are profiled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

# A decode group's rows and a prefill group's tokens: powers of two, over which efficiency changes a hundredfold.
DECODE_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
PREFILL_TOKENS = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
_SHORT_CONTEXT, _LONG_CONTEXT = 32, 1024
_SHORT_SHARE = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSize:
    """A group to measure. `sequences` of `tokens` each: prompts, or what decoding sequences have before the step."""

    decode: bool
    sequences: int
    tokens: int

    @property
    def rows(self) -> int:
        """Return the rows of the group's forward pass."""
        return self.sequences if self.decode else self.sequences * self.tokens


def sizes(*, most_rows: int, most_tokens: int, pool_tokens: int, context: int) -> list[GroupSize]:
    """Return the groups to measure, in an order of which each beginning is a coarser grid.

    Args:
        most_rows: Sequences of the largest decode group.
        most_tokens: Tokens of the largest prefill group.
        pool_tokens: Tokens of KV that a group may have.
        context: Tokens of the longest sequence.

    Each number of rows comes with a short and a long context, so that what grows with the rows and what grows with the
    context can be told apart.
    """
    decode = [rows for rows in DECODE_ROWS if rows <= most_rows and 2 * rows * _SHORT_CONTEXT <= pool_tokens]
    prefill = [tokens for tokens in PREFILL_TOKENS if tokens <= min(most_tokens, pool_tokens)]
    of_decode, of_prefill = [], []
    for rows in _spread(decode):
        longest = min(_LONG_CONTEXT, pool_tokens // rows, context) - 1
        of_decode.append([_decode(rows, _SHORT_CONTEXT), _decode(rows, max(longest, _SHORT_CONTEXT + 1))])
    for tokens in _spread(prefill):
        longest = tokens
        while longest >= context:
            longest //= 2
        of_prefill.append([_prefill(tokens, max(longest // _SHORT_SHARE, 1)), _prefill(tokens, longest)])
    pairs: list[list[GroupSize]] = []
    for number in range(max(len(of_decode), len(of_prefill))):
        pairs += of_decode[number : number + 1] + of_prefill[number : number + 1]
    return list(dict.fromkeys(size for pair in pairs for size in pair))


def _spread(ascending: Sequence[int]) -> list[int]:
    """Return the sizes in an order of which each beginning covers the range: the ends, then what lies between."""
    return list(dict.fromkeys([*ascending[::4], *ascending[-1:], *ascending[2::4], *ascending]))


def _decode(rows: int, context: int) -> GroupSize:
    return GroupSize(decode=True, sequences=rows, tokens=context)


def _prefill(tokens: int, length: int) -> GroupSize:
    return GroupSize(decode=False, sequences=max(tokens // length, 1), tokens=length)
