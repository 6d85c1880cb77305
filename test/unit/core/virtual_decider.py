"""Owns decisions for virtual ranks: each is made twice from the same states, and recorded as an engine records it."""

from __future__ import annotations

import json
from collections.abc import Sequence

from sgl_batch.core.decision_record import group_record
from sgl_batch.core.ended_lengths import EndedLengths
from sgl_batch.core.group_callbacks import BUILT_IN, Callbacks
from sgl_batch.core.group_decider import GroupDecider
from sgl_batch.core.plan import Plan
from sgl_batch.core.rank_agreement import GroupDecision, decide_group
from sgl_batch.core.rank_moves import Migration
from sgl_batch.core.rank_state import RankState


class VirtualDecider:
    """Decides for a group. `records`: its decisions; `faults`: what was wrong with answers of callbacks."""

    def __init__(self, plan: Plan, migration: Migration, callbacks: Callbacks = BUILT_IN) -> None:
        self._plan, self._decider, self._ended = plan, GroupDecider(migration, callbacks), EndedLengths()
        self.records: list[dict] = []
        self.faults: list[str] = []

    def decide(self, states: Sequence[RankState], *, record: bool = True) -> GroupDecision:
        """Return the decision for these states. It is recorded, but for `record` False if no callback is named."""
        for state in states:
            for length in state.ended:
                self._ended.add(length)
        callbacks, migration = self._decider.callbacks, self._decider.migration
        decision = self._decider.decide(states, self._plan)
        again = decide_group(states, self._plan, migration, callbacks, self._ended)
        assert decision == again, "the same states, the same decision"
        if decision.fault is not None:
            self.faults.append(decision.fault.text)
        if record or callbacks.names:
            plain = group_record(states, self._plan, migration, decision, callbacks.names)
            self.records.append(json.loads(json.dumps(plain)))
        return decision
