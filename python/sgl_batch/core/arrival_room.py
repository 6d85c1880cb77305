"""Owns the room of a rank for sequences that arrive from other ranks, while moves are planned or checked."""

from __future__ import annotations

from dataclasses import dataclass

from sgl_batch.core.rank_state import Movable, RankState


@dataclass(slots=True, kw_only=True)
class ArrivalRoom:
    """Room in the accounts of a rank; none while it is partitioned. Sequences that leave it meanwhile make no room.

    pages: pages in the account of admission that are free or kept for the largest gap.
    largest_gap: the most pages that one sequence can need beyond its reservation.
    has_waiting: whether sequences wait there for pages of the account: they come before any that would arrive.
    tokens: tokens for which an exclusive store of its own has pages; None without one.
    request_slots: how many more sequences it can hold.
    held: sequences of other ranks for which its account has reserved pages, because it holds a copy of their first.
    """

    pages: int
    largest_gap: int
    has_waiting: bool
    tokens: int | None
    request_slots: int
    held: frozenset[str] = frozenset()

    @classmethod
    def of(cls, rank: RankState, page_size: int, *, kept_pages: int = 0) -> ArrivalRoom:
        """Return the room of a rank. `kept_pages`: pages that stay free, with a request slot if there are any."""
        stored = None if rank.capacity is None or rank.store else (rank.capacity.store - kept_pages) * page_size
        return cls(
            pages=rank.free_pages + rank.largest_gap - kept_pages,
            largest_gap=rank.largest_gap,
            has_waiting=rank.has_waiting,
            tokens=stored,
            request_slots=0 if rank.partition else rank.state.free_request_slots - (kept_pages > 0),
            held=frozenset(copy.sequence_id for copy in rank.held if copy.arrived),
        )

    def fits(self, item: Movable) -> bool:
        """Return whether a sequence can arrive."""
        stored = self.tokens is None or item.tokens <= self.tokens
        pages = self._new_pages(item) + max(self.largest_gap, item.gap)
        return self.request_slots > 0 and not self.has_waiting and pages <= self.pages and stored

    def take(self, item: Movable) -> None:
        """Let a sequence arrive that fits."""
        self.pages -= max(0, self._new_pages(item))  # what it brings does not come if the move fails
        self.largest_gap = max(self.largest_gap, item.gap)
        if self.tokens is not None:
            self.tokens -= item.tokens
        self.request_slots -= 1

    def holds(self, item: Movable) -> bool:
        """Return whether the rank holds a copy of the first pages of a sequence."""
        return item.sequence.sequence_id in self.held

    def _new_pages(self, item: Movable) -> int:
        return 0 if self.holds(item) else item.new_pages
