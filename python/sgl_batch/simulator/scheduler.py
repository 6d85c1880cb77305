"""The interface of what decides for a simulated rank: ours is core/decide, the ways of other engines are in rivals/."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from sgl_batch.core.actions import Actions
from sgl_batch.core.decide import decide
from sgl_batch.core.kv_policy import KVPolicy
from sgl_batch.core.kv_state import KVState
from sgl_batch.core.page_boundary import State
from sgl_batch.core.plan import Plan

if TYPE_CHECKING:
    from sgl_batch.simulator.rank import SimulatedRank


class Scheduler(Protocol):
    """Decides what one rank does next, from the same views as core/decide, with the same actions.

    is_local: whether each rank of an instance decides by itself, and all wait for the longest pass. If not, the ranks
        agree on each step as ours do (core/rank_agreement).
    """

    is_local: bool

    def next(self, state: State, kv: KVState, plan: Plan) -> Actions:
        """Return actions that are carried out in order; see `core.decide.decide`."""

    def meet(self, ranks: Sequence[SimulatedRank]) -> bool:
        """Look at all ranks before each of them decides what it does in a pass (`is_local`).

        Returns whether a rank holds prompts back for others, so that all decide anew after each step.
        """


class Ours:
    """Decides as the engine does, with the KV policy of its form of KV."""

    is_local = False

    def __init__(self, policy: KVPolicy) -> None:
        self.policy = policy

    def next(self, state: State, kv: KVState, plan: Plan) -> Actions:
        return decide(state, kv, plan, self.policy)

    def meet(self, ranks: Sequence[SimulatedRank]) -> bool:
        return False
