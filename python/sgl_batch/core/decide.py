"""Decides what a rank does next, between boundaries and at a boundary (BatchGen Algorithm 2).

Theory of operation. Between two boundaries the running sequences decode, one step a decision. Pages, queue and store
are looked at only at a boundary, every `boundary_tokens` steps or earlier when few sequences run (page_boundary). So a
decision between boundaries looks at a few counts (with --mix-prefill also at the head of the queue), however many
sequences wait.

    decide()
      |
      +-- KV of restored sequences has arrived? -------- yes --> Join
      |
      +-- choices wait whose leader has prefilled? ----- yes --> PrefillChoices
      |
      +-- boundary not due? ---------------------------- yes --> Step: decode rows, and prompt chunks (compose)
      |
      |   boundary:
      +-- reservations grow (--admission)? ------------- yes --> Grow > Suspend those whose cannot be extended
      +-- too few run or are ready, and prompts fit? --- yes --> Prefill (admission, order policy)
      |
      +-- KV policy: Sync > Suspend > Evict > Extend > Refill, Restore > Join > BeginInterval, or Idle

What happens at a boundary, in order, and why (if reservations grow, those of running sequences are extended before all
that: they come before prompts):

1. Prefill comes first: the decode group can be no larger than what is ready. The running sequences keep their KV and
   go on afterwards. Prefill repeats until enough sequences are ready (`ready_target`).
2. Sync completes copies to the store that have ended. A page of the device may be given away only when its copy is
   complete.
3. Suspend, then Evict, if pages of the device lack: running sequences with the most decoded tokens, and waiting
   sequences that still have pages there, give theirs back.
4. Extend gives every sequence that still runs the pages for the coming interval. It follows 3, which frees the pages,
   and precedes 5, so that running sequences never lack pages because others come back.
5. Refill and Restore bring waiting sequences into the room that is left, first come first served. Restore only begins
   the copies, which overlap the next steps; the sequences join when their KV has arrived.
6. Join waits for these copies only if no rank has a row to decode meanwhile.
7. BeginInterval: steps are counted from here.

The forms of KV differ. Without a store all pages are reserved at admission, and only Refill and 7 remain; if
reservations grow, 5 and 6 bring back sequences that gave way. With an exclusive store, a Join comes before 2 if leaving
sequences need blocks of sequences on their way back. Streamed decode has no 3 and 4, because running sequences hold no
pages of the device.

With several ranks, each first extends its own reservations. Then rank_agreement decides from the states of all ranks
whether they prefill and which sequences migrate; a KV policy that is local (`KVPolicy.is_local`) decides the rest for
its own rank.

The same state, plan and policy give the same actions. The scheduler carries them out on a device, a simulator in
modelled time, and a replay compares them with a recording.
"""

from __future__ import annotations

from dataclasses import replace

from sgl_batch.core.actions import Abort, Actions, Join, Prefill, PrefillChoices, Step
from sgl_batch.core.admission import Admission, group_by_prompt, refusal
from sgl_batch.core.compose import StepView, step_policy
from sgl_batch.core.growth import extend_running
from sgl_batch.core.kv_policy import KVPolicy
from sgl_batch.core.kv_state import KVState
from sgl_batch.core.page_boundary import State, boundary_due, prefill_units, prefill_wanted
from sgl_batch.core.page_ledger import PageLedger
from sgl_batch.core.plan import Plan
from sgl_batch.core.sequence import SequenceState


def decide(state: State, kv: KVState, plan: Plan, policy: KVPolicy) -> Actions:
    """Return what the rank does next. Pure, but for what a policy notes of measured intervals.

    Args:
        state: counts and views of the rank's sequences, true now. Views are read during the call only.
        kv: where the KV of these sequences lies, true now. The call notes in queued sequences what their prompts would
            share (`kv.estimate_shared`), and nothing else.
        plan: the plan in force.
        policy: the KV policy of the engine's form of KV; the same object for all decisions of a rank.

    Returns:
        A list of actions that is never empty. The caller carries out all of them, in order, before it calls again. If
        the last one is not Prefill, PrefillChoices, Step or Idle, the caller calls again at once with the new state.
    """
    if kv.arrived:
        return (Join(),)
    if state.forked:
        return (PrefillChoices(most=plan.prefill.b_moe),)
    if not boundary_due(state, plan):
        return (compose(state, kv, plan, policy),)
    if growth := extend_running(kv, plan):
        return growth
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
    """Return what is done with a sequence that has arrived: nothing (it is queued), or Abort if it can never fit.

    `device` and `store` are the ledgers of `admission.refusal`, `most_prompt_tokens` is as there.
    """
    why = refusal(sequence, device, store, most_prompt_tokens=most_prompt_tokens)
    return () if why is None else (Abort(sequences=(sequence,), why=why),)


def prefill_of(units: tuple[Admission, ...], state: State, kv: KVState, plan: Plan, policy: KVPolicy) -> Prefill:
    """Return the prefill of these units, with where their KV is to lie; the rest of a begun prompt comes first."""
    return replace(policy.prefill(units, state, kv, plan), rest=state.rest)


def compose(state: State, kv: KVState, plan: Plan, policy: KVPolicy) -> Step:
    """Return the next forward pass between boundaries."""
    return step_policy(plan).compose(StepView(state=state, kv=kv, plan=plan), policy)


def estimate_shared(state: State, kv: KVState) -> None:
    """Note in the first queued sequences how many tokens their prompts share, before a group is chosen of them."""
    kv.estimate_shared(unit.leader for unit in group_by_prompt(state.queued, most_members=state.request_slots))


def decode_continues(state: State, kv: KVState, plan: Plan) -> bool:
    """Return whether a decode step of the running group comes next, whatever the results in flight are.

    The steps of an interval include those that a sequence computes past its end, so its pages suffice for them.
    """
    return bool(state.running) and not (kv.arrived or state.forked or boundary_due(state, plan))
