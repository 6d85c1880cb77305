"""Owns what an order policy may do beside ordering a queue, and what holds for one that does not.

A policy takes part by having the methods; the functions below ask it. None of them has a caller in the engine yet.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from sgl_batch.core.order.interface import OrderPolicy
from sgl_batch.core.sequence import SequenceState

# Whole pages of tokens with which prompts begin, from the first on, each by its key in the prefix tree.
Prefix = tuple[bytes, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LineMetadata:
    """What is known of a line before its tokens are submitted; None where it is not. Lengths are in tokens."""

    line_id: str
    prompt_tokens: int | None = None
    predicted_tokens: int | None = None
    prefix_path: Prefix = ()


@runtime_checkable
class HearsLines(Protocol):
    """A policy that looks at all lines of a job before the first of them is offered."""

    def announce(self, lines: Iterable[LineMetadata]) -> None:
        """These lines come, each as the sequence of its id. Read once, in the order of the input."""


@runtime_checkable
class AssignsRanks(Protocol):
    """A policy that says on which rank a sequence is to run."""

    def assign(self, queued: Iterable[SequenceState], num_ranks: int) -> Mapping[str, int]:
        """The rank of each of these sequences that is to be on a certain one, by sequence id."""


@runtime_checkable
class KeepsPrefixes(Protocol):
    """A policy that keeps pages of prompts for sequences to come."""

    def keeps(self, prefix: Prefix) -> bool:
        """Whether these pages stay although no sequence that is alive has them. Asked when the last one leaves."""

    def release(self, pages: int) -> Iterable[Prefix]:
        """Prefixes that are kept no longer, so that `pages` pages become free; fewer where the policy has fewer."""


def announce(order: OrderPolicy, lines: Iterable[LineMetadata]) -> None:
    """Tell a policy of lines to come; one that does not listen orders them when they are offered."""
    if isinstance(order, HearsLines):
        order.announce(lines)


def assign(order: OrderPolicy, queued: Iterable[SequenceState], num_ranks: int) -> Mapping[str, int]:
    """The ranks that a policy wants sequences on; any other sequence stays where it came."""
    if not isinstance(order, AssignsRanks):
        return {}
    ranks = order.assign(queued, num_ranks)
    assert all(0 <= rank < num_ranks for rank in ranks.values()), f"there are {num_ranks} ranks: {ranks}"
    return ranks


def keeps(order: OrderPolicy, prefix: Prefix) -> bool:
    """Whether pages stay that no sequence has any more; by default they are freed with the last one."""
    return isinstance(order, KeepsPrefixes) and order.keeps(prefix)


def release(order: OrderPolicy, pages: int) -> list[Prefix]:
    """The prefixes to free where `pages` pages are wanted; by default none is kept."""
    return list(order.release(pages)) if isinstance(order, KeepsPrefixes) else []
