"""Owns KV on the device alone whose pages are taken as tokens come: other engines keep it so.

A sequence that gives way loses its KV and is computed again. Pages are taken for one interval of the plan ahead, at
most one page more for a sequence than an engine holds that takes each page with its first token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from sgl_batch.core.actions import Action, Chunk, Extend, Suspend
from sgl_batch.core.admission import Admission
from sgl_batch.core.admission_policy import RESERVE, AdmissionPolicy
from sgl_batch.core.kv_policy import DeviceOnly, KVPolicy
from sgl_batch.core.page_ledger import PageLedger, pages_for
from sgl_batch.core.plan import Plan
from sgl_batch.core.sequence import SequenceState


class LazyPages:
    """KV of a rank on its device alone (a `KVForm`), with pages for the coming interval.

    Args:
        pages: Of the device.
        page_size: Tokens of a page.
        policy: What admission keeps of its own; the scheduler reads it.
        on_release: Called with each sequence whose pages are freed.
        waits_last: Whether a sequence that gives way is queued behind all others, or before them.
    """

    streams, loses, store_free = False, True, 0

    def __init__(
        self,
        pages: int,
        page_size: int,
        policy: AdmissionPolicy = RESERVE,
        *,
        on_release: Callable[[SequenceState], None] | None = None,
        waits_last: bool = False,
    ) -> None:
        self.device = self.admission = PageLedger(pages, page_size, policy=policy)
        self.policy: KVPolicy = DeviceOnly()
        self.waits_last = waits_last
        self._on_release = on_release

    def admit(self, unit: Admission, plan: Plan, pages: int | None) -> None:
        self.device.reserve(unit.leader.sequence_id, pages_ahead(unit.leader, self.device, plan))

    def prefilled(self, sequence: SequenceState) -> None:
        """It lies on the device."""

    def leave(self, sequences: Sequence[SequenceState]) -> int:
        return 0

    def restore(self, sequence: SequenceState, pages: int) -> int:
        raise AssertionError("KV that is lost is not restored")

    def arrive(self, sequence: SequenceState) -> None:
        raise AssertionError("KV that is lost does not come back")

    def join(self, sequence: SequenceState) -> None:
        """Its KV lies where it runs."""

    def stream(self, *, on: bool) -> None:
        raise AssertionError("there is no store to stream from")

    def tokens_in_memory(self, waiting: int, running: int) -> int:
        return waiting + running

    def release(self, sequence: SequenceState) -> None:
        self.device.release(sequence.sequence_id)
        if self._on_release is not None:
            self._on_release(sequence)

    def take_in(self, sequence: SequenceState, pages: int, gap: int) -> None:
        self.device.reserve(sequence.sequence_id, pages)

    def room(self, sequence: SequenceState, plan: Plan) -> tuple[int, int]:
        return pages_ahead(sequence, self.device, plan), 0


def pages_ahead(sequence: SequenceState, ledger: PageLedger, plan: Plan) -> int:
    """Return the pages with which a sequence decodes through the coming interval."""
    ahead = pages_for(sequence.kv_tokens + plan.boundary_tokens, ledger.page_size)
    return min(ahead, ledger.whole_pages(sequence))


def extend_or_retract(
    kept: list[SequenceState], ledger: PageLedger, plan: Plan
) -> tuple[list[Action], list[SequenceState]]:
    """Return how running sequences get their pages for the coming interval, and those that stay.

    `kept`: in the order in which they are kept; as many of the last ones as must be are retracted, the last one first.
    """
    needs = [pages_ahead(one, ledger, plan) for one in kept]
    lacking = sum(needs) - sum(ledger.held(one.sequence_id) for one in kept) - ledger.free_pages
    count = len(kept)
    while lacking > 0:
        count -= 1
        lacking -= needs[count]
    stay, gone = kept[:count], tuple(reversed(kept[count:]))
    more = tuple((one, need) for one, need in zip(stay, needs, strict=False) if need > ledger.held(one.sequence_id))
    actions: list[Action] = [Suspend(sequences=gone, why="pages lack")] if gone else []
    return [*actions, *([Extend(pages=more)] if more else [])], stay


def cut(chunk: Chunk, tokens: int, page: int) -> Chunk:
    """Return as much of a chunk as has so many tokens, in whole pages if it is not all of it."""
    if chunk.tokens <= tokens:
        return chunk
    return Chunk(sequence=chunk.sequence, start=chunk.start, tokens=tokens // page * page)
