"""Owns what SGLang's scheduler of a rank keeps for admission: its new-token ratio, and whether its batch is full."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from sgl_batch.core.sequence import SequenceState

# The most tokens of a sequence's further output that count, and the steps of those that stay after a retraction.
_MOST_NEW_TOKENS, _STEPS_AFTER = 4096, 20
# The share with which an engine starts, the least as a part of it, and the steps in which it falls to that.
_FIRST, _LEAST, _DECAY_STEPS = 0.7, 0.14, 600


class TokenRatio:
    """SGLang's new-token ratio: for which share of their further outputs admission leaves room to running sequences.

    It falls with each step, and is set from the running sequences after each retraction (NewTokenRatioTracker).

    ratio: the share now.
    full: whether admission has found no room. No prompt is tried until a sequence leaves (`batch_is_full`).
    ended: running sequences that have ended, and count as running until `drop_ended`.
    prefills: whether the last pass computed prompts.

    Args:
        conservativeness: As `--schedule-conservativeness`, of which SGLang takes 0.3 with data-parallel attention.
    """

    name = "token ratio"
    grows = False

    def __init__(self, conservativeness: float = 1.0) -> None:
        self.ratio = min(_FIRST * conservativeness, 1.0)
        self.full = self.prefills = False
        self.ended = 0
        self._least = self.ratio * _LEAST
        self._decay = (self.ratio - self._least) / _DECAY_STEPS
        # The steps since the last boundary by which the ratio has fallen.
        self._counted = 0

    def expected_tokens(self, sequence: SequenceState) -> int:
        """Return the tokens of its further output for which room is left."""
        return math.ceil(self.ratio * further_tokens(sequence))

    def expected_rest(self, running: Iterable[SequenceState]) -> float:
        """Return the tokens that running sequences are expected to generate yet."""
        return self.ratio * sum(map(further_tokens, running))

    def finished(self, sequence: SequenceState, length: int) -> None:
        """Take in that a sequence has ended, one that ran or one whose prompt the last pass has computed."""
        if self.prefills:
            self.full = False
        else:
            self.ended += 1

    def drop_ended(self) -> None:
        """Let running sequences that have ended leave, so that prompts are tried again."""
        self.full = self.full and not self.ended
        self.ended = 0

    def decoded(self, steps: int) -> None:
        """Take in that so many steps were decoded since the last boundary."""
        more = max(0, steps - self._counted)
        self.ratio = max(self.ratio - more * self._decay, self._least)
        self._counted = max(steps, self._counted)

    def begin_interval(self) -> None:
        """Note that steps count from a boundary, at which nothing was retracted."""
        self._counted = 0

    def retracted(self, kept: Sequence[SequenceState]) -> None:
        """Take in that sequences were retracted at a boundary; these stay. The ratio does not fall in the next step."""
        decoded = sum(one.generated_tokens + _STEPS_AFTER for one in kept)
        self.ratio = min(1.0, decoded / (sum(one.max_new_tokens for one in kept) + 1))
        self.full, self._counted = False, 1


def further_tokens(sequence: SequenceState) -> int:
    """Return the tokens that a sequence may still generate, as far as SGLang counts them."""
    return counted_tokens(sequence.max_new_tokens - sequence.generated_tokens)


def counted_tokens(tokens: int) -> int:
    """Return how many of the tokens that may be generated SGLang counts."""
    return min(max(tokens, 0), _MOST_NEW_TOKENS)
