"""Decides when a boundary is due, and which of prefill, refill and decode comes at one (Algorithm 2).

A decision over one rank's own state is made from this in `decide`, one over several ranks in `rank_agreement`.
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
    """How many sequences a rank has in each place, and its queue. `steps`: decode steps since the last boundary.

    `queued` and `ready` may be views, each in the order of their turn: a state is good until the next change of what
    they show. Only a boundary looks at more than their lengths.
    `changed`: whether a sequence arrived, was prefilled or finished since the last boundary.
    `request_slots`: how many sequences the device can hold; `free_request_slots`: how many more it can take now.
    `returning` counts those that neither run nor wait, because their KV is on its way back to the device, `forked` the
    choices whose leader has computed their prompt. `begun`: the sequence of whose prompt decode steps have computed a
    part. `queued_tokens`: of all queued prompts together. `urgent`: whether a boundary was asked for before its time,
    by an arrival that cannot wait or by memory that runs short.
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
        """What is left of the prompt that decode steps have begun."""
        if self.begun is None:
            return None
        start = self.begun.computed_tokens
        return Chunk(sequence=self.begun, start=start, tokens=self.begun.kv_tokens - start)


BoundaryAction = Prefill | Refill | Step | Idle


def boundary_due(state: State, plan: Plan) -> bool:
    """A boundary comes every `boundary_tokens` steps, or at once when the waiting could double the runners.

    The second rule keeps the ramp at the start of a job short: sequences that arrive during the first interval
    need not wait for its end while the group is small. It asks only when something has changed: where pages keep the
    group small, each step would be a boundary otherwise.
    """
    if state.running == 0 or state.urgent or state.steps >= plan.boundary_tokens:
        return True
    waiting = len(state.ready) + len(state.queued)
    return state.changed and state.running * 2 <= plan.decode.b_moe and waiting >= state.running


def decide_at_boundary(
    state: State, plan: Plan, ledger: PageLedger, capacity: TierCapacity | None = None
) -> BoundaryAction:
    """The action at a boundary, however it came about, where KV lies on the device. Pure."""
    units = prefill_units(state, plan, ledger, capacity)
    if units or (state.begun is not None and prefill_wanted(state, plan)):
        return Prefill(units=tuple(units), rest=state.rest)
    return refill_or_go_on(state, plan)


def refill_or_go_on(state: State, plan: Plan) -> Refill | Step | Idle:
    """The action at a boundary at which nothing is prefilled: READY sequences join in the order of arrival.

    They hold pages of the device, so that there are never many.
    """
    room = max(0, plan.decode.b_moe - state.running)
    refill = tuple(nsmallest(room, state.ready, key=lambda sequence: sequence.arrival))
    if refill:
        return Refill(sequences=refill)
    return Step() if state.running else Idle()


def prefill_wanted(state: State, plan: Plan) -> bool:
    """Whether so few sequences run or are ready that queued ones are to be prefilled, as far as they fit.

    Once begun (`filling`), prefill goes on until enough are ready.
    """
    resident = state.running + len(state.ready) + state.returning
    target = plan.ready_target if state.filling else plan.refill_watermark * plan.decode.b_moe
    return (bool(state.queued) or state.begun is not None) and resident < max(target, 1)


def prefill_units(
    state: State, plan: Plan, ledger: PageLedger, capacity: TierCapacity | None = None
) -> list[Admission]:
    """Return the queued units to prefill now.

    `capacity`: what each tier has for prompts, where a page lies in one tier alone.
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
    )
