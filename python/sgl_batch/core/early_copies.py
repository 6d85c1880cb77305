"""Decides which moves are prepared: the full pages of a sequence are copied to its next rank while it runs on.

A full page never changes. So a copy of the pages that are full at one boundary is still right at the next one, where
the sequence moves with the rest of its KV. Nothing here says who owns a sequence: until it moves it belongs to its
rank, and the copy is worth nothing if it does not move.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from sgl_batch.core.page_ledger import pages_for
from sgl_batch.core.plan import Plan

# The most pages that are copied to one rank from one boundary to the next, unless a single sequence has more.
MOST_PAGES = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlyCopy:
    """The first `full_pages` of a sequence of rank `source` are copied to rank `target`.

    The target reserves `pages` for the sequence, which can need `gap` more there.
    """

    sequence_id: str
    source: int
    target: int
    full_pages: int
    pages: int
    gap: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldCopy:
    """Pages that a rank holds for a sequence that still belongs to rank `source`. `arrived`: whether all are there."""

    sequence_id: str
    source: int
    arrived: bool


def least_worth_preparing(plan: Plan) -> int:
    """Return from how many full pages on a sequence is worth preparing.

    A move at a boundary copies the open page and the pages that an interval fills in any case.
    """
    return 2 + pages_for(plan.boundary_tokens, plan.page_size)


def within_limits(wanted: Iterable[EarlyCopy]) -> tuple[EarlyCopy, ...]:
    """Return the copies to begin now: few pages to each rank, and between two ranks in one direction."""
    taken: list[EarlyCopy] = []
    pages: Counter[int] = Counter()
    for copy in wanted:
        fits = not pages[copy.target] or pages[copy.target] + copy.full_pages <= MOST_PAGES
        if fits and not any((other.source, other.target) == (copy.target, copy.source) for other in taken):
            taken.append(copy)
            pages[copy.target] += copy.full_pages
    return tuple(taken)
