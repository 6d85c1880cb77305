"""Decides what happens next: prefill a group, refill the decode group, or decode a step (Algorithm 2).

Without memory pressure: admission reserves every page a sequence can need, so nothing is evicted here.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from sgl_batch.core.admission import Admission, group_by_prompt, select_prefill_group
from sgl_batch.core.exclusive import Rooms, placed
from sgl_batch.core.order import OrderPolicy
from sgl_batch.core.page_ledger import PageLedger
from sgl_batch.core.plan import Plan
from sgl_batch.core.sequence import Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """What the decision is made from. `steps` counts decode steps since the last boundary.

    `queued` and `ready` may be views: a state is good until the next change of what they look at. Only a boundary
    looks at more than their lengths.
    `changed`: whether somebody arrived, was prefilled or finished since the last boundary.
    `slots` is how many sequences the device can hold, `free_slots` how many more it can take now. `returning` counts
    those that neither run nor wait, because their KV is on its way back to the device.
    """

    queued: Seq[Sequence]
    ready: Seq[Sequence]
    running: int
    steps: int
    slots: int
    free_slots: int
    filling: bool
    changed: bool = True
    returning: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillGroup:
    """Prefill these units as one group."""

    units: tuple[Admission, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Refill:
    """Boundary: combine these READY sequences into the decode group, then decode on."""

    sequences: tuple[Sequence, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeStep:
    """Run one decode step of the running group; `at_boundary` when a boundary found nothing to change."""

    at_boundary: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Idle:
    """There is nothing to do."""


Action = PrefillGroup | Refill | DecodeStep | Idle


def boundary_due(state: State, plan: Plan) -> bool:
    """A boundary comes every `boundary_tokens` steps, or at once when the waiting could double the runners.

    The second rule keeps the ramp at the start of a job short: sequences that arrive during the first page
    need not wait for its end while the group is small. It asks only when something has changed: where pages keep the
    group small, each step would be a boundary otherwise.
    """
    if state.running == 0 or state.steps >= plan.boundary_tokens:
        return True
    waiting = len(state.ready) + len(state.queued)
    return state.changed and state.running * 2 <= plan.decode.b_moe and waiting >= state.running


def decide(state: State, plan: Plan, ledger: PageLedger, order: OrderPolicy) -> Action:
    """The next action. Pure: the same state gives the same action."""
    return decide_at_boundary(state, plan, ledger, order) if boundary_due(state, plan) else DecodeStep()


def decide_at_boundary(
    state: State, plan: Plan, ledger: PageLedger, order: OrderPolicy, rooms: Rooms | None = None
) -> Action:
    """The action at a boundary, however it came about."""
    group = prefill_units(state, plan, ledger, order, rooms)
    if group:
        return PrefillGroup(units=tuple(group))
    room = plan.decode.b_moe - state.running
    refill = tuple(sorted(state.ready, key=order.key)[:room]) if room > 0 else ()
    if refill:
        return Refill(sequences=refill)
    return DecodeStep(at_boundary=True) if state.running else Idle()


def prefill_wanted(state: State, plan: Plan) -> bool:
    """Whether so few sequences run or are ready that queued ones are to be prefilled, as far as they fit.

    Once begun (`filling`), prefill goes on until enough are ready.
    """
    resident = state.running + len(state.ready) + state.returning
    target = plan.ready_target if state.filling else plan.refill_watermark * plan.decode.b_moe
    return bool(state.queued) and resident < max(target, 1)


def prefill_units(
    state: State, plan: Plan, ledger: PageLedger, order: OrderPolicy, rooms: Rooms | None = None
) -> list[Admission]:
    """Queued units to prefill now. `rooms`: what each tier has for prompts, where a page lies in one of them alone."""
    if not prefill_wanted(state, plan):
        return []
    units = group_by_prompt(state.queued, order, most_members=state.slots)
    if rooms is not None:
        units = placed(units, rooms, ledger, plan)
    return select_prefill_group(units, ledger, b_moe=plan.prefill.b_moe, free_slots=state.free_slots)
