"""Decides how many blocks of a store each rank of a node may hold until the next boundary.

Theory. The ranks of a node share one store of S blocks. A rank takes blocks between two boundaries without asking any
other, so that it needs to know how many it may hold: its lease. The leases of all ranks add up to S at every moment. At
a boundary each rank says how many blocks it keeps: those that its sequences have reserved or hold. What all ranks keep
is at most what they have leased, so that S minus that sum is free, and is dealt anew:

1. to admitted sequences that wait for blocks, because they come before prompts;
2. to queued prompts in the order of their arrival at the node. The first one that does not fit gets all that is left,
   and no rank but its own admits a prompt until the next boundary. What comes free meanwhile is then dealt to it, so
   that it fits at last, however many smaller prompts other ranks have;
3. the rest by weight: what running sequences grow by until the next boundary is taken from it.

A sequence that moves takes the part of the lease with it that it uses, in the same moment on both ranks. So a sequence
may use any part of the store up to the whole, and what one rank does not need is not kept from the others.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreUse:
    """What a rank has of the store that it shares. Numbers are blocks.

    total: of the store, for all ranks.
    leased: the most that this rank may hold now.
    kept: what it cannot give back, at most `leased`.
    is_account: whether its account of admission is of these blocks. If not, prompts have room on the device as well.
    """

    total: int
    leased: int
    kept: int
    is_account: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """The blocks that a rank may hold until the next boundary, and whether it admits prompts until then."""

    blocks: int
    admits: bool = True


def deal_blocks(
    uses: Sequence[StoreUse],
    *,
    waiting: Sequence[int],
    claims: Iterable[tuple[int, int]],
    weights: Sequence[int],
) -> tuple[Lease, ...]:
    """Return the lease of each rank. The leases add up to the blocks of the store.

    Args:
        uses: by rank; all of the same store.
        waiting: by rank, the blocks for which its admitted sequences wait.
        claims: queued prompts, the oldest first: the rank of each and the blocks that it reserves. Read up to the first
            that does not fit.
        weights: by rank, positive, its part of what is left.
    """
    blocks = [use.kept for use in uses]
    free = uses[0].total - sum(blocks)
    assert free >= 0, f"the ranks keep {sum(blocks)} blocks of {uses[0].total}"
    for rank, wanted in enumerate(waiting):
        given = min(wanted, free)
        blocks[rank] += given
        free -= given
    lacking = None
    for rank, wanted in claims:
        given = min(wanted, free)
        blocks[rank] += given
        free -= given
        if given < wanted:
            lacking = rank
            break
    for rank, part in enumerate(_parts(free, weights)):
        blocks[rank] += part
    return tuple(
        Lease(blocks=number, admits=lacking in (None, rank) or not uses[rank].is_account)
        for rank, number in enumerate(blocks)
    )


def _parts(free: int, weights: Sequence[int]) -> list[int]:
    """Return `free` in whole parts by weight, which add up to it."""
    whole = sum(weights)
    edges = [free * upto // whole for upto in accumulate(weights, initial=0)]
    return [end - begin for begin, end in pairwise(edges)]
