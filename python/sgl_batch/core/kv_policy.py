"""Decides at a boundary where KV lies: the interface of the forms of KV, and the form that has the device alone."""

from __future__ import annotations

from typing import Protocol

from sgl_batch.core.actions import Actions, BeginInterval, Idle, Prefill, Refill, Step
from sgl_batch.core.admission import Admission
from sgl_batch.core.exclusive import TierCapacity
from sgl_batch.core.kv_state import KVState
from sgl_batch.core.page_boundary import State, refill_or_go_on
from sgl_batch.core.plan import Plan
from sgl_batch.core.rank_agreement import Movable


class KVPolicy(Protocol):
    """What differs between the forms of KV, as far as it is decided.

    `name` stands for it in records of decisions.
    `is_local`: of several ranks, each decides for itself what happens at a boundary once nothing is prefilled.
    """

    name: str
    is_local: bool

    def capacity(self, state: State, kv: KVState, plan: Plan) -> TierCapacity | None:
        """What each tier has for prompts, where a page lies in one of them alone."""

    def prefill(self, units: tuple[Admission, ...], state: State, kv: KVState, plan: Plan) -> Prefill:
        """Where the KV of a prefill group is to lie."""

    def at_boundary(self, state: State, kv: KVState, plan: Plan, *, others_run: bool = False) -> Actions:
        """What is done at a boundary at which nothing is prefilled.

        `others_run`: whether another rank has rows, which waiting here would hold up.
        """

    def movable(
        self, ready: list[Movable], running: list[Movable], kv: KVState, plan: Plan
    ) -> tuple[list[Movable], list[Movable]]:
        """Of waiting and running sequences that can change their rank, those whose KV may leave now."""


class DeviceOnly:
    """KV lies on the device alone: a sequence holds from its admission on all pages that it can need."""

    name = "device"
    is_local = False

    def capacity(self, state: State, kv: KVState, plan: Plan) -> None:
        """There is one tier."""

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
