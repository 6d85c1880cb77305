"""Decides what a rank does next, between boundaries and at one (BatchGen Algorithm 2).

The same state, plan and policy give the same actions: the scheduler carries them out on a device, a simulator in
modelled time.
"""

from __future__ import annotations

from dataclasses import replace

from sgl_batch.core.actions import Abort, Actions, Join, Prefill, PrefillChoices, Step
from sgl_batch.core.admission import Admission, group_by_prompt, refusal
from sgl_batch.core.compose import StepView, step_policy
from sgl_batch.core.kv_policy import KVPolicy
from sgl_batch.core.kv_state import KVState
from sgl_batch.core.page_boundary import State, boundary_due, prefill_units, prefill_wanted
from sgl_batch.core.page_ledger import PageLedger
from sgl_batch.core.plan import Plan
from sgl_batch.core.sequence import SequenceState


def decide(state: State, kv: KVState, plan: Plan, policy: KVPolicy) -> Actions:
    """The next actions. Where none of them is for the device, `decide` is asked again when they are carried out."""
    if kv.arrived:
        return (Join(),)
    if state.forked:
        return (PrefillChoices(most=plan.prefill.b_moe),)
    if not boundary_due(state, plan):
        return (compose(state, kv, plan, policy),)
    if prefill_wanted(state, plan):
        estimate_shared(state, kv)
        units = prefill_units(state, plan, kv.admission, policy.capacity(state, kv, plan))
        if units or state.begun is not None:
            return (prefill_of(tuple(units), state, kv, plan, policy),)
    actions = policy.at_boundary(state, kv, plan)
    return (*actions[:-1], compose(state, kv, plan, policy)) if isinstance(actions[-1], Step) else actions


def on_arrival(
    sequence: SequenceState, device: PageLedger, store: PageLedger | None, *, most_prompt_tokens: int | None
) -> Actions:
    """What is done with a sequence that has come: it is queued (no action), or aborted where it can never fit."""
    why = refusal(sequence, device, store, most_prompt_tokens=most_prompt_tokens)
    return () if why is None else (Abort(sequences=(sequence,), why=why),)


def prefill_of(units: tuple[Admission, ...], state: State, kv: KVState, plan: Plan, policy: KVPolicy) -> Prefill:
    """A prefill of these units, and first of what is left of a prompt that was begun, with where KV is to lie."""
    return replace(policy.prefill(units, state, kv, plan), rest=state.rest)


def compose(state: State, kv: KVState, plan: Plan, policy: KVPolicy) -> Step:
    """What the next forward pass between boundaries consists of."""
    return step_policy(plan).compose(StepView(state=state, kv=kv, plan=plan), policy)


def estimate_shared(state: State, kv: KVState) -> None:
    """Note of the first queued sequences what their prompts share, from which groups are made."""
    kv.estimate_shared(unit.leader for unit in group_by_prompt(state.queued, most_members=state.request_slots))


def decode_continues(state: State, kv: KVState, plan: Plan) -> bool:
    """Whether a decode step of the running group comes next, whatever the results under way are.

    An interval's steps count those that a sequence computes behind its end, so that its pages are enough for these.
    """
    return bool(state.running) and not (kv.arrived or state.forked or boundary_due(state, plan))
