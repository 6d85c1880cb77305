"""Decides at a boundary who keeps, loses and gets pages of the device, where KV can wait in the store (BatchGen 5.3).

A sequence that runs holds what the next page of steps can need and no more. Which pages these are, and their copies,
are the affair of others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Generic, TypeVar

from sgl_batch.core.page_ledger import PageLedger, pages_for
from sgl_batch.core.plan import Plan
from sgl_batch.core.sequence import Sequence

Page = TypeVar("Page", bound=Hashable)

FREE_PAGES = 2  # that a running sequence holds at a boundary beside those with KV in them


class ResidentPrompts(Generic[Page]):
    """Pages of prompts on the device, each once, however many sequences have it that run or come back."""

    def __init__(self) -> None:
        self._pages: dict[str, Seq[Page]] = {}
        self._holders: Counter[Page] = Counter()

    def __len__(self) -> int:
        return len(self._holders)

    def copy(self) -> ResidentPrompts[Page]:
        """The same, to try what would be."""
        other = ResidentPrompts[Page]()
        other._pages, other._holders = dict(self._pages), Counter(self._holders)
        return other

    def lacking(self, pages: Seq[Page]) -> list[Page]:
        """Those of a prompt's pages that nobody has on the device."""
        return [page for page in pages if page not in self._holders]

    def enter(self, name: str, pages: Seq[Page]) -> None:
        """A sequence has its prompt's pages on the device from now on."""
        assert name not in self._pages, f"{name} is on the device already"
        self._pages[name] = pages
        self._holders.update(pages)

    def leave(self, name: str) -> list[Page]:
        """A sequence leaves the device; returns the pages that nobody has there any more."""
        dropped = []
        for page in self._pages.pop(name, ()):
            self._holders[page] -= 1
            if not self._holders[page]:
                del self._holders[page]
                dropped.append(page)
        return dropped


@dataclass(frozen=True, slots=True, kw_only=True)
class Residency:
    """Evict, Extend and Refill, in this order: who is suspended, and how many pages the others hold from now on.

    Pages of their prompts that sequences share come on top of these. `evict`: READY sequences that lose their pages of
    the device. `restore`: READY and SUSPENDED ones that are to run; their KV comes back from the store where they have
    no pages of the device.
    """

    suspend: tuple[Sequence, ...]
    evict: tuple[Sequence, ...]
    extend: tuple[tuple[Sequence, int], ...]
    restore: tuple[tuple[Sequence, int], ...]


def pages_to_run(sequence: Sequence, ledger: PageLedger, plan: Plan) -> int:
    """Pages with which a sequence can run to the next boundary; never more than it can use to its end."""
    tokens, size = sequence.kv_tokens, ledger.page_size
    need = max(pages_for(tokens, size) + FREE_PAGES, pages_for(tokens + plan.boundary_tokens, size))
    return min(need, ledger.whole_pages(sequence))


def _own_pages(sequence: Sequence, ledger: PageLedger, plan: Plan, pages_of: Callable[[str], Seq[Page]]) -> int:
    return pages_to_run(sequence, ledger, plan) - len(pages_of(sequence.sequence_id))


def decide_residency(
    running: Seq[Sequence],
    waiting: Iterable[Sequence],
    ledger: PageLedger,
    plan: Plan,
    *,
    prompts: ResidentPrompts[Page],
    pages_of: Callable[[str], Seq[Page]],
    restoring: int = 0,
) -> Residency:
    """Who holds which number of pages until the next boundary. Pure.

    `ledger` has what runners and `restoring` sequences, whose KV is on its way, hold now, and what those of `waiting`
    hold that have KV on the device: they keep it where nobody that runs needs the pages. `prompts` are the pages of
    their prompts that can be shared, which `pages_of` says of any sequence: each takes room once. Where runners cannot
    all be extended, those that have generated most are suspended first: they would soon ask again. Waiting sequences
    come back in the order in which they began to wait; one that does not fit blocks those behind it, so that nobody
    starves. Each runs at least until the next boundary then, so that outputs grow whatever happens. The last runner is
    never suspended: alone, any sequence fits, or it would have been refused.
    """
    prompts = prompts.copy()
    need = {s.sequence_id: _own_pages(s, ledger, plan, pages_of) for s in running}
    waiting = sorted(waiting, key=lambda s: s.waits_since)
    resident = [s for s in waiting if ledger.holds(s.sequence_id)]
    others = ledger.reserved_pages - len(prompts) - sum(ledger.held(s.sequence_id) for s in (*running, *resident))
    room = ledger.total_pages - others - len(prompts) - sum(need.values())
    kept = sorted(running, key=lambda s: (s.generated_tokens, s.arrival))
    suspend: list[Sequence] = []
    while room < 0 and len(kept) > (0 if others else 1):
        victim = kept.pop()
        suspend.append(victim)
        room += need[victim.sequence_id] + len(prompts.leave(victim.sequence_id))
    assert room >= 0, f"{kept[0].sequence_id} alone lacks {-room} pages of {ledger.total_pages}"
    gone = {s.sequence_id for s in suspend}
    restore: dict[str, tuple[Sequence, int]] = {}
    for sequence in waiting:
        own, prompt = _own_pages(sequence, ledger, plan, pages_of), pages_of(sequence.sequence_id)
        takes = own + len(prompts.lacking(prompt))
        if len(kept) + restoring + len(restore) >= plan.decode.b_moe or takes > room:
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


def _evicted(resident: Iterable[Sequence], ledger: PageLedger, room: int) -> Iterable[Sequence]:
    """Those for which no pages are left, the last that came first."""
    for sequence in resident:
        room -= ledger.held(sequence.sequence_id)
        if room < 0:
            yield sequence
