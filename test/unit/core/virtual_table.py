"""Owns the answers of a virtual rank's table of sequences."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from virtual_sequences import Running

from sgl_batch.core.admission import arriving_pages, first_pages
from sgl_batch.core.plan import Plan
from sgl_batch.core.rank_state import Movable
from sgl_batch.core.sequence import SequenceState

if TYPE_CHECKING:
    from virtual_rank import VirtualRank


class VirtualTable:
    """What a group's steps ask of a rank: lengths of outputs that have ended, and what may leave its queue."""

    def __init__(self, rank: VirtualRank) -> None:
        self._rank = rank
        self.ended: list[int] = []

    def queue_movable(self, queued: Iterable[SequenceState], plan: Plan) -> list[Movable]:
        ledger, found = self._rank.ledger, []
        for one in queued:
            if one.prompt_group is None and not self._rank.is_rooted(one):
                pages = first_pages(one, ledger, plan)
                found.append(Movable(sequence=one, tokens=0, pages=pages, gap=ledger.whole_pages(one) - pages))
        return found

    def movable(self, sequences: Iterable[SequenceState]) -> list[Movable]:
        """Return those of a rank's sequences with KV that may leave it."""
        rank, found = self._rank, []
        for one in sequences:
            pages = arriving_pages(one, rank.ledger, rank.plan)
            if one.prompt_group is None and not rank.is_rooted(one):
                gap = rank.ledger.whole_pages(one) - pages
                leased = rank.ledger.held(one.sequence_id) if rank.kv.leased else 0
                found.append(Movable(sequence=one, tokens=one.kv_tokens, pages=pages, gap=gap, leased=leased))
        return found

    def replica_room(self, running: Running) -> int | None:
        """Return the pages of the device for replicas; None where the rank's account is the device's."""
        rank = self._rank
        return None if rank.replica_ledger is rank.ledger else rank.replica_ledger.free_pages

    def take_ended(self) -> list[int]:
        ended, self.ended = self.ended, []
        return ended

    def at_boundary(self, number: int) -> None:
        """Do nothing: waiting sequences run in the order of their arrival."""
