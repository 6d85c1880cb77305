"""Decides whether a sequence moves with its KV, or as tokens whose KV its next rank computes (BatchGen 5.6)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveRates:
    """What a rank has measured: tokens a second whose KV it sends to another rank, and whose KV it computes.

    0: not measured yet.
    """

    sent_per_s: float = 0.0
    computed_per_s: float = 0.0


UNKNOWN = MoveRates()


def moves_as_tokens(tokens: int, rates: MoveRates) -> bool:
    """Return whether KV of `tokens` is computed anew in less time than it is sent, where both rates are known."""
    if not (rates.sent_per_s and rates.computed_per_s):
        return False
    return tokens / rates.computed_per_s < tokens / rates.sent_per_s


@dataclass(slots=True, kw_only=True)
class RateMeter:
    """Adds up what a rank sends and computes, for its `rates`."""

    sent_tokens: int = 0
    sent_s: float = 0.0
    computed_tokens: int = 0
    computed_s: float = 0.0

    def note_sent(self, tokens: int, seconds: float) -> None:
        """Note the KV of `tokens` that another rank has received, in `seconds` from the offer to the release."""
        self.sent_tokens += tokens
        self.sent_s += seconds

    def note_computed(self, tokens: int, seconds: float) -> None:
        """Note a prefill of `tokens`, in `seconds` from its begin to its results."""
        self.computed_tokens += tokens
        self.computed_s += seconds

    @property
    def rates(self) -> MoveRates:
        """The mean rates so far."""
        return MoveRates(
            sent_per_s=self.sent_tokens / self.sent_s if self.sent_s else 0.0,
            computed_per_s=self.computed_tokens / self.computed_s if self.computed_s else 0.0,
        )
