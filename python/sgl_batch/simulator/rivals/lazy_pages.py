"""Owns KV on the device alone whose pages are taken as tokens come: other engines keep it so.

A sequence that gives way loses its KV and is computed again. Pages are taken for one interval of the plan ahead, at
most one page more for a sequence than an engine holds that takes each page with its first token.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

from sgl_batch.core.actions import Action, Chunk, Extend, Suspend
from sgl_batch.core.admission import Admission
from sgl_batch.core.admission_policy import RESERVE, AdmissionPolicy
from sgl_batch.core.kv_policy import DeviceOnly, KVPolicy
from sgl_batch.core.kv_state import KVState
from sgl_batch.core.page_boundary import State
from sgl_batch.core.page_ledger import PageLedger, pages_for
from sgl_batch.core.plan import Plan
from sgl_batch.core.sequence import SequenceState

# The most tokens of a sequence's further output that count, and the steps of those that stay after a retraction.
_MOST_NEW_TOKENS, _STEPS_AFTER = 4096, 20
# The share with which an engine starts, the least as a part of it, and the steps in which it falls to that.
_FIRST, _LEAST, _DECAY_STEPS = 0.7, 0.14, 600


class TokenRatio:
    """SGLang's new-token ratio: for which share of their further outputs admission leaves room to running sequences.

    It falls with each step, and is set from the running sequences after each retraction (NewTokenRatioTracker).

    Args:
        conservativeness: As `--schedule-conservativeness`, of which SGLang takes 0.3 with data-parallel attention.
    """

    name = "token ratio"
    grows = False

    def __init__(self, conservativeness: float = 1.0) -> None:
        self.ratio = min(_FIRST * conservativeness, 1.0)
        self._least = self.ratio * _LEAST
        self._decay = (self.ratio - self._least) / _DECAY_STEPS

    def expected_tokens(self, sequence: SequenceState) -> int:
        """Return the tokens of its further output for which room is left."""
        return math.ceil(self.ratio * further_tokens(sequence))

    def finished(self, sequence: SequenceState, length: int) -> None:
        """It makes no difference."""

    def passed(self, steps: int) -> None:
        """Take in that steps were decoded without a retraction."""
        self.ratio = max(self.ratio - steps * self._decay, self._least)

    def retracted(self, kept: Sequence[SequenceState]) -> None:
        """Take in that sequences were retracted; these stay."""
        decoded = sum(one.generated_tokens + _STEPS_AFTER for one in kept)
        self.ratio = min(1.0, decoded / (sum(one.max_new_tokens for one in kept) + 1))


def further_tokens(sequence: SequenceState) -> int:
    """Return the tokens that a sequence may still generate, as far as SGLang counts them."""
    return min(max(sequence.max_new_tokens - sequence.generated_tokens, 0), _MOST_NEW_TOKENS)


class LazyPages:
    """KV of a rank on its device alone (a `KVForm`), with pages for the coming interval.

    Args:
        pages: Of the device.
        page_size: Tokens of a page.
        policy: What admission keeps of its own; the scheduler reads it.
        on_release: Called with each sequence whose pages are freed.
    """

    streams, loses, store_free = False, True, 0

    def __init__(
        self,
        pages: int,
        page_size: int,
        policy: AdmissionPolicy = RESERVE,
        *,
        on_release: Callable[[SequenceState], None] | None = None,
    ) -> None:
        self.device = self.admission = PageLedger(pages, page_size, policy=policy)
        self.policy: KVPolicy = DeviceOnly()
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

    `kept`: in the order in which they are kept; as many of the last ones as must be are retracted.
    """
    needs = [pages_ahead(one, ledger, plan) for one in kept]
    lacking = sum(needs) - sum(ledger.held(one.sequence_id) for one in kept) - ledger.free_pages
    count = len(kept)
    while lacking > 0:
        count -= 1
        lacking -= needs[count]
    stay, gone = kept[:count], tuple(kept[count:])
    more = tuple((one, need) for one, need in zip(stay, needs, strict=False) if need > ledger.held(one.sequence_id))
    actions: list[Action] = [Suspend(sequences=gone, why="pages lack")] if gone else []
    return [*actions, *([Extend(pages=more)] if more else [])], stay


def chunks_of(
    state: State, kv: KVState, plan: Plan, tokens: int, *, room: float, costs: Callable[[SequenceState], float]
) -> tuple[Chunk, ...]:
    """Return prompts and parts of prompts of at most so many tokens, of which the last may stay unfinished.

    Args:
        state: Of the rank.
        kv: Of the rank.
        plan: Its limits.
        tokens: The most tokens of a pass's prompts.
        room: Tokens that admission has left.
        costs: Says how much of `room` a queued sequence takes. One that finds the device empty takes nothing.
    """
    chunks: list[Chunk] = []
    for chunk in _waiting_chunks(state, kv, plan, room, costs):
        size = min(chunk.tokens, tokens)
        if size < chunk.tokens:
            size -= size % plan.page_size
        if size <= 0:
            break
        chunks.append(Chunk(sequence=chunk.sequence, start=chunk.start, tokens=size))
        tokens -= size
        if size < chunk.tokens:
            break
    return tuple(chunks)


def _waiting_chunks(
    state: State, kv: KVState, plan: Plan, room: float, costs: Callable[[SequenceState], float]
) -> Iterable[Chunk]:
    """Yield the rest of a begun prompt, and the prompts that admission has room for, as they are asked for."""
    if state.rest is not None:
        yield state.rest
    ledger = kv.device
    free, rows = ledger.free_pages, plan.decode.b_moe - state.running - (state.begun is not None)
    is_empty = not ledger.reserved_pages
    for sequence in state.queued:
        pages, cost = pages_ahead(sequence, ledger, plan), costs(sequence)
        if rows <= 0 or pages > free or not (is_empty or cost <= room):
            return
        yield Chunk(sequence=sequence, start=0, tokens=sequence.kv_tokens)
        free, rows, room, is_empty = free - pages, rows - 1, room - cost, False
