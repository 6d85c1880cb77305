"""Owns the optional abilities of order policies, and the defaults for policies without them.

A policy has an ability if it has the methods of its protocol; the functions below call them. No function has a caller
in the engine yet.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from sgl_batch.core.order.interface import OrderPolicy
from sgl_batch.core.sequence import SequenceState

# The whole pages of tokens with which a prompt begins, from the first on, each by its key in the prefix tree.
Prefix = tuple[bytes, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LineMetadata:
    """What is known of a line before its tokens are submitted. Lengths are in tokens; None if not known."""

    line_id: str
    prompt_tokens: int | None = None
    predicted_tokens: int | None = None
    prefix_path: Prefix = ()


@runtime_checkable
class AcceptsLines(Protocol):
    """A policy that reads all lines of a job before the first of them is offered."""

    def announce(self, lines: Iterable[LineMetadata]) -> None:
        """Take note of lines that will be offered, each as the sequence of its id.

        `lines` is in the order of the input and can be read once.
        """


@runtime_checkable
class AssignsRanks(Protocol):
    """A policy that decides on which rank a sequence runs."""

    def assign(self, queued: Iterable[SequenceState], num_ranks: int) -> Mapping[str, int]:
        """Return the rank of sequences by id, from 0 to `num_ranks` - 1. Others stay on the rank where they arrived."""


@runtime_checkable
class KeepsPrefixes(Protocol):
    """A policy that keeps prompt pages for later sequences."""

    def keeps(self, prefix: Prefix) -> bool:
        """Return whether these pages stay although no living sequence has them. Called when the last one leaves."""

    def release(self, pages: int) -> Iterable[Prefix]:
        """Return prefixes to give up, so that `pages` pages become free; fewer if the policy keeps fewer."""


def announce(order: OrderPolicy, lines: Iterable[LineMetadata]) -> None:
    """Announce lines to a policy; a policy without this ability orders them when they are offered."""
    if isinstance(order, AcceptsLines):
        order.announce(lines)


def assign(order: OrderPolicy, queued: Iterable[SequenceState], num_ranks: int) -> Mapping[str, int]:
    """Return the ranks that a policy assigns, by sequence id; any other sequence stays where it arrived."""
    if not isinstance(order, AssignsRanks):
        return {}
    ranks = order.assign(queued, num_ranks)
    assert all(0 <= rank < num_ranks for rank in ranks.values()), f"there are {num_ranks} ranks: {ranks}"
    return ranks


def keeps(order: OrderPolicy, prefix: Prefix) -> bool:
    """Return whether pages stay that no sequence has any more; by default they are freed with the last one."""
    return isinstance(order, KeepsPrefixes) and order.keeps(prefix)


def release(order: OrderPolicy, pages: int) -> list[Prefix]:
    """Return the prefixes to free if `pages` pages are wanted; by default none is kept."""
    return list(order.release(pages)) if isinstance(order, KeepsPrefixes) else []
