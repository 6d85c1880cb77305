"""Decides at a boundary who keeps, loses and gets pages of the device, where KV can wait in the store (BatchGen 5.3).

A sequence that runs holds what the next page of steps can need and no more. Which pages these are, and their copies,
are the affair of others.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from sgl_batch.core.page_ledger import PageLedger, pages_for
from sgl_batch.core.plan import Plan
from sgl_batch.core.sequence import Sequence

FREE_PAGES = 2  # that a running sequence holds at a boundary beside those with KV in them


@dataclass(frozen=True, slots=True, kw_only=True)
class Residency:
    """Evict, Extend and Refill, in this order: who is suspended, and how many pages the others hold from now on.

    `restore`: READY and SUSPENDED sequences whose KV comes back from the store.
    """

    suspend: tuple[Sequence, ...]
    extend: tuple[tuple[Sequence, int], ...]
    restore: tuple[tuple[Sequence, int], ...]


def pages_to_run(sequence: Sequence, ledger: PageLedger, plan: Plan) -> int:
    """Pages with which a sequence can run to the next boundary; never more than it can use to its end."""
    tokens, size = sequence.kv_tokens, ledger.page_size
    need = max(pages_for(tokens, size) + FREE_PAGES, pages_for(tokens + plan.boundary_tokens, size))
    return min(need, ledger.whole_pages(sequence))


def decide_residency(
    running: Seq[Sequence], waiting: Iterable[Sequence], ledger: PageLedger, plan: Plan, *, restoring: int = 0
) -> Residency:
    """Who holds which number of pages until the next boundary. Pure.

    `ledger` has what runners and `restoring` sequences, whose KV is on its way, hold now. Where runners cannot all be
    extended, those that have generated most are suspended first: they would soon ask again. Waiting sequences come back
    in the order in which they began to wait; one that does not fit blocks those behind it, so that nobody starves. Each
    runs at least until the next boundary then, so that outputs grow whatever happens. The last runner is never
    suspended: alone, any sequence fits, or it would have been refused.
    """
    need = {s.sequence_id: pages_to_run(s, ledger, plan) for s in running}
    others = ledger.reserved_pages - sum(ledger.held(s.sequence_id) for s in running)
    room = ledger.total_pages - others - sum(need.values())
    kept = sorted(running, key=lambda s: (s.generated_tokens, s.arrival))
    suspend: list[Sequence] = []
    while room < 0 and len(kept) > (0 if others else 1):
        victim = kept.pop()
        suspend.append(victim)
        room += need[victim.sequence_id]
    assert room >= 0, f"{kept[0].sequence_id} alone lacks {-room} pages of {ledger.total_pages}"
    gone = {s.sequence_id for s in suspend}
    return Residency(
        suspend=tuple(suspend),
        extend=tuple((s, need[s.sequence_id]) for s in running if s.sequence_id not in gone),
        restore=tuple(_restored(waiting, ledger, plan, room, plan.decode.b_moe - len(kept) - restoring)),
    )


def _restored(
    waiting: Iterable[Sequence], ledger: PageLedger, plan: Plan, room: int, places: int
) -> Iterable[tuple[Sequence, int]]:
    for sequence in sorted(waiting, key=lambda s: s.waits_since):
        need = pages_to_run(sequence, ledger, plan)
        if places <= 0 or need > room:
            return
        places, room = places - 1, room - need
        yield sequence, need
