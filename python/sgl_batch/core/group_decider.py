"""Owns what decisions for a group of ranks remember from boundary to boundary: output lengths, callbacks in force."""

from __future__ import annotations

from collections.abc import Sequence

from sgl_batch.core.ended_lengths import EndedLengths
from sgl_batch.core.group_callbacks import BUILT_IN, Callbacks
from sgl_batch.core.partition_costs import PartitionCosts
from sgl_batch.core.plan import Plan
from sgl_batch.core.rank_agreement import GroupDecision, decide_group
from sgl_batch.core.rank_moves import Migration
from sgl_batch.core.rank_state import RankState


class GroupDecider:
    """Decides for a group at each of its boundaries, in their order.

    After the first wrong answer of a callback the default decides instead of it. `callbacks`: those in force. `costs`:
    measured seconds of passes that ranks share; None while they are not known.
    """

    def __init__(self, migration: Migration, callbacks: Callbacks = BUILT_IN) -> None:
        self.migration, self.callbacks = migration, callbacks
        self.costs: PartitionCosts | None = None
        self._ended = EndedLengths()

    def decide(self, ranks: Sequence[RankState], plan: Plan) -> GroupDecision:
        """Return what every rank does at a boundary. See `decide_group`."""
        for rank in ranks:
            for length in rank.ended:
                self._ended.add(length)
        decision = decide_group(ranks, plan, self.migration, self.callbacks, self._ended, self.costs)
        if decision.fault is not None:
            self.callbacks = self.callbacks.without(decision.fault.callback)
        return decision
