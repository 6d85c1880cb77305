"""Decides when a boundary is due, and whether prefill, refill or decode follows (BatchGen Algorithm 2).

`decide` uses this for the state of one rank and explains the whole boundary; `rank_agreement` for several ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import nsmallest

from sgl_batch.core.actions import Chunk, Idle, Prefill, Refill, Step
from sgl_batch.core.admission import Admission, group_by_prompt, select_prefill_group
from sgl_batch.core.exclusive import TierCapacity, assign_tier
from sgl_batch.core.page_ledger import PageLedger
from sgl_batch.core.plan import Plan
from sgl_batch.core.sequence import SequenceState


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """The sequences of a rank, by what they do, at one moment.

    `queued` and `ready` may be views of live collections: a State is valid until they change. Only a boundary reads
    more than their lengths.

    queued: sequences to prefill, in the order of the policy.
    ready: READY and SUSPENDED sequences, which wait to run, in the order of their turn.
    running: number of sequences that decode.
    steps: decode steps since the last boundary.
    request_slots: how many sequences the device can hold (rows of SGLang's request table).
    free_request_slots: how many more it can take now.
    filling: whether prefill has begun and goes on until enough sequences are ready.
    changed: whether a sequence arrived, was prefilled or finished since the last boundary.
    returning: number of sequences whose KV is on its way back to the device; they neither run nor wait.
    forked: number of choices whose leader has computed their prompt, and that have yet to compute its last token.
    queued_tokens: tokens of all queued prompts together.
    begun: the sequence whose prompt decode steps have computed in part; None if there is none.
    urgent: whether a boundary is asked for at once, by an arrival that cannot wait or by memory that runs short.
    """

    queued: Sequence[SequenceState]
    ready: Sequence[SequenceState]
    running: int
    steps: int
    request_slots: int
    free_request_slots: int
    filling: bool
    changed: bool = True
    returning: int = 0
    forked: int = 0
    queued_tokens: int = 0
    begun: SequenceState | None = None
    urgent: bool = False

    @property
    def rest(self) -> Chunk | None:
        """The rest of the prompt that decode steps have begun; None if there is none."""
        if self.begun is None:
            return None
        start = self.begun.computed_tokens
        return Chunk(sequence=self.begun, start=start, tokens=self.begun.kv_tokens - start)


BoundaryAction = Prefill | Refill | Step | Idle


def boundary_due(state: State, plan: Plan) -> bool:
    """Return whether a boundary is due: every `boundary_tokens` steps, or if waiting sequences could double the group.

    The second rule keeps the ramp at the start of a job short: sequences that arrive during the first interval do not
    wait for its end while the group is small. It applies only if something has changed; otherwise each step would be a
    boundary while a lack of pages keeps the group small.
    """
    if state.running == 0 or state.urgent or state.steps >= plan.boundary_tokens:
        return True
    waiting = len(state.ready) + len(state.queued)
    return state.changed and state.running * 2 <= plan.decode.b_moe and waiting >= state.running


def decide_at_boundary(
    state: State, plan: Plan, ledger: PageLedger, capacity: TierCapacity | None = None
) -> BoundaryAction:
    """Return the action at a boundary, for any reason that it came, when KV lies on the device. Pure."""
    units = prefill_units(state, plan, ledger, capacity)
    if units or (state.begun is not None and prefill_wanted(state, plan)):
        return Prefill(units=tuple(units), rest=state.rest)
    return refill_or_go_on(state, plan)


def refill_or_go_on(state: State, plan: Plan) -> Refill | Step | Idle:
    """Return the action at a boundary without prefill: READY sequences join the group in the order of arrival.

    READY sequences hold device pages here, so that there are never many to sort.
    """
    room = max(0, plan.decode.b_moe - state.running)
    refill = tuple(nsmallest(room, state.ready, key=lambda sequence: sequence.arrival))
    if refill:
        return Refill(sequences=refill)
    return Step() if state.running else Idle()


def prefill_wanted(state: State, plan: Plan) -> bool:
    """Return whether so few sequences run or are ready that queued ones are to be prefilled, as far as they fit.

    Once prefill has begun (`filling`), it goes on until `ready_target` is reached.
    """
    resident = state.running + len(state.ready) + state.returning
    target = plan.ready_target if state.filling else plan.refill_watermark * plan.decode.b_moe
    return (bool(state.queued) or state.begun is not None) and resident < max(target, 1)


def prefill_units(
    state: State, plan: Plan, ledger: PageLedger, capacity: TierCapacity | None = None
) -> list[Admission]:
    """Return the queued units to prefill now; empty if prefill is not wanted or nothing fits.

    `capacity`: with an exclusive store, the pages that each tier has for prompts.
    """
    if not prefill_wanted(state, plan):
        return []
    rest = state.rest
    units = group_by_prompt(state.queued, most_members=state.request_slots)
    if capacity is not None:
        units = assign_tier(units, capacity, ledger, plan)
    return select_prefill_group(
        units,
        ledger,
        b_moe=plan.prefill.b_moe,
        free_request_slots=state.free_request_slots,
        taken=0 if rest is None else rest.tokens,
        plan=plan,
    )
