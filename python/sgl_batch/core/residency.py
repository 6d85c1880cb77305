"""Decides at a boundary which sequences keep, lose and get pages of the device, where KV can wait in the store
(BatchGen 5.3).

A sequence that runs holds what the coming interval can need and no more. Which pages these are, and their copies, are
the executor's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import takewhile

from sgl_batch.core.page_ledger import PageLedger, pages_for
from sgl_batch.core.plan import Plan
from sgl_batch.core.resident_prompts import Page, ResidentPrompts
from sgl_batch.core.sequence import SequenceState
from sgl_batch.core.victims import MostDecoded, VictimPolicy

MOST_DECODED = MostDecoded()
FREE_PAGES = 2  # that a running sequence holds at a boundary beside those with KV in them


@dataclass(frozen=True, slots=True, kw_only=True)
class Residency:
    """Evict, Extend and Refill, in this order: who is suspended, and how many pages the others hold from now on.

    Pages of their prompts that sequences share come on top of these. `evict`: READY sequences that lose their pages of
    the device. `restore`: READY and SUSPENDED ones that are to run; their KV comes back from the store where they have
    no pages of the device.
    """

    suspend: tuple[SequenceState, ...]
    evict: tuple[SequenceState, ...]
    extend: tuple[tuple[SequenceState, int], ...]
    restore: tuple[tuple[SequenceState, int], ...]


def pages_to_run(sequence: SequenceState, ledger: PageLedger, plan: Plan) -> int:
    """Pages with which a sequence can run to the next boundary; never more than it can use to its end."""
    tokens, size = sequence.kv_tokens, ledger.page_size
    need = max(pages_for(tokens, size) + FREE_PAGES, pages_for(tokens + plan.boundary_tokens, size))
    return min(need, ledger.whole_pages(sequence))


def _own_pages(
    sequence: SequenceState, ledger: PageLedger, plan: Plan, pages_of: Callable[[str], Sequence[Page]]
) -> int:
    return pages_to_run(sequence, ledger, plan) - len(pages_of(sequence.sequence_id))


def decide_residency(
    running: Sequence[SequenceState],
    waiting: Sequence[SequenceState],
    ledger: PageLedger,
    plan: Plan,
    *,
    prompts: ResidentPrompts[Page],
    pages_of: Callable[[str], Sequence[Page]],
    restoring: int = 0,
    victims: VictimPolicy = MOST_DECODED,
) -> Residency:
    """Who holds which number of pages until the next boundary. Pure.

    `waiting` is in the order in which the sequences began to wait, of which no more are looked at than come back; those
    with KV on the device are the first. `ledger` has what runners and `restoring` sequences, whose KV is on its way,
    hold now, and what those waiting ones hold: they keep it where nobody that runs needs the pages. `prompts` are the
    pages of their prompts that can be shared, which `pages_of` says of any sequence: each takes room once. Where
    runners cannot all be extended, or are more than the plan lets run by now, `victims` are suspended. Waiting
    sequences come back in their order; one that does not fit blocks those behind it, so that nothing starves. Each runs
    at least until the next boundary then, so that outputs grow whatever happens. The last runner is never suspended:
    alone, any sequence fits, or it would have been refused.
    """
    prompts = prompts.copy()
    need = {s.sequence_id: _own_pages(s, ledger, plan, pages_of) for s in running}
    resident = list(takewhile(lambda s: ledger.holds(s.sequence_id), waiting))
    others = ledger.reserved_pages - len(prompts) - sum(ledger.held(s.sequence_id) for s in (*running, *resident))
    room = ledger.total_pages - others - len(prompts) - sum(need.values())
    num_kept = len(running)
    suspend: list[SequenceState] = []
    for victim in victims.victims(running, max(0, -room)):
        too_many = num_kept + restoring > plan.decode.b_moe
        if not (room < 0 or too_many) or num_kept <= (0 if others else 1):
            break
        suspend.append(victim)
        num_kept -= 1
        room += need[victim.sequence_id] + len(prompts.leave(victim.sequence_id))
    assert room >= 0, f"one sequence alone lacks {-room} pages of {ledger.total_pages}"
    gone = {s.sequence_id for s in suspend}
    restore: dict[str, tuple[SequenceState, int]] = {}
    for sequence in waiting:
        if num_kept + restoring + len(restore) >= plan.decode.b_moe:
            break
        own, prompt = _own_pages(sequence, ledger, plan, pages_of), pages_of(sequence.sequence_id)
        takes = own + len(prompts.lacking(prompt))
        if takes > room:
            break
        room -= takes
        prompts.enter(sequence.sequence_id, prompt)
        restore[sequence.sequence_id] = sequence, own
    return Residency(
        suspend=tuple(suspend),
        evict=tuple(_evicted([s for s in resident if s.sequence_id not in restore], ledger, room)),
        extend=tuple((s, need[s.sequence_id]) for s in running if s.sequence_id not in gone),
        restore=tuple(restore.values()),
    )


def _evicted(resident: Iterable[SequenceState], ledger: PageLedger, room: int) -> Iterable[SequenceState]:
    """Those for which no pages are left, the last that came first."""
    for sequence in resident:
        room -= ledger.held(sequence.sequence_id)
        if room < 0:
            yield sequence
