"""Decides at a boundary where KV lies: the interface of KV policies, and the policies for the device alone.

The policies for a host KV store are in `store_policies`. What a policy decides, the same form in kv_offload/ carries
out.
"""

from __future__ import annotations

from typing import Protocol

from sgl_batch.core.actions import Action, Actions, BeginInterval, Idle, Join, Prefill, Refill, Restore, Step
from sgl_batch.core.admission import Admission
from sgl_batch.core.exclusive import TierCapacity
from sgl_batch.core.growth import extend_waiting
from sgl_batch.core.kv_state import KVState
from sgl_batch.core.page_boundary import State, refill_or_go_on
from sgl_batch.core.plan import Plan
from sgl_batch.core.rank_state import Movable


class KVPolicy(Protocol):
    """Decides where the KV of sequences lies; one implementation for each form of KV.

    A rank has one policy object for its life. A policy decides only: it changes neither `state` nor `kv`, which are
    valid during the call, and may keep what it has measured of past intervals. The same calls in the same order give
    the same answers, so that a replay can repeat them.

    name: the policy's name in records of decisions; `replay.POLICIES` makes a policy of it.
    is_local: with several ranks, whether each rank decides by itself what happens at a boundary without prefill. If
        not, the control rank decides for all of them.
    """

    name: str
    is_local: bool

    def capacity(self, state: State, kv: KVState, plan: Plan) -> TierCapacity | None:
        """Return the pages that each tier has for prompts now.

        Returns None if the account of admission (`kv.admission`) alone limits a prefill group: without a store, and
        with an inclusive one. Only an exclusive store limits each tier by itself.
        """

    def prefill(self, units: tuple[Admission, ...], state: State, kv: KVState, plan: Plan) -> Prefill:
        """Return the prefill of a group, with where its KV is to lie.

        `units` were chosen within `capacity` of the same `state` and `kv`. Before it asks again, the caller carries out
        the prefill, or a step with its `on_device`.
        """

    def at_boundary(self, state: State, kv: KVState, plan: Plan, *, others_run: bool = False) -> Actions:
        """Return the actions of a boundary at which nothing is prefilled.

        Args:
            state: the rank's sequences.
            kv: where their KV lies.
            plan: the plan in force.
            others_run: whether another rank has rows to decode, which would be held up if this rank waited for copies.

        Returns:
            Actions in the order in which they are carried out, never empty. They end with Step or Idle, or the caller
            decides again after them. A list without BeginInterval does not end the boundary.
        """

    def movable(
        self, ready: list[Movable], running: list[Movable], kv: KVState, plan: Plan
    ) -> tuple[list[Movable], list[Movable]]:
        """Return the sequences whose KV may leave the rank now, of those that can migrate.

        Args:
            ready: waiting sequences, READY and SUSPENDED.
            running: running sequences.
            kv: where their KV lies.
            plan: the plan in force.

        Returns:
            The sequences of `ready` and those of `running` that may leave, as two lists.
        """


class DeviceOnly:
    """KV lies on the device alone: from its admission on, a sequence holds all pages that it can need."""

    name = "device"
    is_local = False

    def capacity(self, state: State, kv: KVState, plan: Plan) -> None:
        """Return None: there is one tier."""

    def prefill(self, units: tuple[Admission, ...], state: State, kv: KVState, plan: Plan) -> Prefill:
        return Prefill(units=units)

    def at_boundary(self, state: State, kv: KVState, plan: Plan, *, others_run: bool = False) -> Actions:
        action = refill_or_go_on(state, plan)
        if isinstance(action, Idle):
            return (action,)
        return (action, BeginInterval(), Step()) if isinstance(action, Refill) else (BeginInterval(), action)

    def movable(
        self, ready: list[Movable], running: list[Movable], kv: KVState, plan: Plan
    ) -> tuple[list[Movable], list[Movable]]:
        return ready, running


class Overflowing:
    """KV lies on the device alone, and reservations grow (core/growth).

    A sequence holds the pages that it has reserved, and may give way to others with all its KV.
    """

    name = "overflowing"
    is_local = True

    def capacity(self, state: State, kv: KVState, plan: Plan) -> None:
        """Return None: prompts are computed on the device, and the account of admission limits them."""

    def prefill(self, units: tuple[Admission, ...], state: State, kv: KVState, plan: Plan) -> Prefill:
        return Prefill(units=units)

    def at_boundary(self, state: State, kv: KVState, plan: Plan, *, others_run: bool = False) -> Actions:
        """See KVPolicy. Waiting sequences run whose reservations last for the coming interval.

        Those that are away begin to come back; where no rank has rows, this one waits for them.
        """
        ledger, room = kv.admission, max(0, plan.decode.b_moe - state.running - state.returning)
        waiting = sorted(state.ready, key=lambda sequence: sequence.arrival)
        slots = state.free_request_slots - state.returning
        trial, found = extend_waiting(waiting, ledger, plan, most=room, request_slots=slots)
        joining = tuple(sequence for sequence in found if ledger.holds(sequence.sequence_id))
        runs, returns = bool(joining or state.running), bool(trial.back or state.returning)
        if not (runs or returns):
            return (Idle(),)
        actions: list[Action] = [*trial.grow()]
        if joining:
            actions.append(Refill(sequences=joining))
        if trial.back:
            actions.append(Restore(pages=tuple(trial.back)))
        if not (runs or others_run):
            actions.append(Join(wait=True))
        return (*actions, BeginInterval())

    def movable(
        self, ready: list[Movable], running: list[Movable], kv: KVState, plan: Plan
    ) -> tuple[list[Movable], list[Movable]]:
        """Return all but the sequences that are away, whose KV another rank cannot read."""
        return [item for item in ready if kv.admission.holds(item.sequence.sequence_id)], running
