"""Decides at a boundary which sequences keep, lose and get pages of the device, if KV can wait in the store
(BatchGen 5.3).

A running sequence holds the pages that the coming interval can need, and no more. The executor picks the pages and
copies them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Protocol

from sgl_batch.core.page_ledger import PageLedger, pages_for
from sgl_batch.core.plan import Plan
from sgl_batch.core.resident_prompts import Page, ResidentPrompts
from sgl_batch.core.sequence import SequenceState

FREE_PAGES = 2  # empty pages that a running sequence holds at a boundary, besides its pages with KV


class VictimPolicy(Protocol):
    """The order in which running sequences are suspended, if pages of the device lack or fewer sequences may run."""

    def victims(self, running: Sequence[SequenceState], need: int) -> Iterator[SequenceState]:
        """Return the running sequences in the order in which they are suspended; the caller reads as many as it needs.

        `need`: number of pages that lack; 0 if too many sequences run.
        """


class MostDecoded:
    """Suspends first the sequences that have generated most: they would soon need pages again (BatchGen 5.3)."""

    def victims(self, running: Sequence[SequenceState], need: int) -> Iterator[SequenceState]:
        return iter(sorted(running, key=lambda s: (s.generated_tokens, s.arrival), reverse=True))


MOST_DECODED = MostDecoded()


@dataclass(frozen=True, slots=True, kw_only=True)
class Residency:
    """Which sequences are suspended, and how many device pages the others hold from now on. Carried out in this order.

    Shared prompt pages are not counted in these numbers of pages.

    suspend: running sequences that leave the device.
    evict: waiting sequences that lose their pages of the device.
    extend: sequences that keep running, each with its pages.
    restore: waiting sequences that are to run, each with its pages. Their KV is copied from the store unless it is on
        the device.
    """

    suspend: tuple[SequenceState, ...]
    evict: tuple[SequenceState, ...]
    extend: tuple[tuple[SequenceState, int], ...]
    restore: tuple[tuple[SequenceState, int], ...]


def pages_to_run(sequence: SequenceState, ledger: PageLedger, plan: Plan) -> int:
    """Return the pages with which a sequence can run to the next boundary, at most those that it can use to its end."""
    tokens, size = sequence.kv_tokens, ledger.page_size
    need = max(pages_for(tokens, size) + FREE_PAGES, pages_for(tokens + plan.boundary_tokens, size))
    return min(need, ledger.whole_pages(sequence))


def room_to_restore(running: Iterable[SequenceState], ledger: PageLedger, plan: Plan) -> int:
    """Return the pages of the device for waiting sequences, if running ones keep what they need to the next boundary.

    Pages of prompts that running sequences share count for each of them, so that there may be more.
    """
    grow = sum(max(0, pages_to_run(one, ledger, plan) - ledger.held(one.sequence_id)) for one in running)
    return max(0, ledger.free_pages - grow)


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
    """Return how many device pages each sequence holds until the next boundary. Pure.

    If running sequences cannot all be extended, or are more than the plan lets run, `victims` are suspended. The last
    one is never suspended: alone, any sequence fits, or it would have been refused. Then waiting sequences are restored
    in their order; one that does not fit blocks those behind it, so that none starves. Each runs at least until the
    next boundary, so that its output grows whatever happens. Waiting sequences keep pages of the device that no running
    sequence needs.

    Args:
        running: the running sequences.
        waiting: waiting sequences in the order in which they began to wait; those with KV on the device are the first.
            Read only as far as needed.
        ledger: the account of device pages, with what running, waiting and `restoring` sequences hold now.
        plan: the plan in force.
        prompts: shared prompt pages on the device; each takes room once. Not changed.
        pages_of: returns the shareable prompt pages of a sequence, by its id.
        restoring: number of sequences whose KV is on its way to the device.
        victims: the order in which running sequences are suspended.
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
    """Yield the waiting sequences for which no pages are left: those that began to wait last."""
    for sequence in resident:
        room -= ledger.held(sequence.sequence_id)
        if room < 0:
            yield sequence
