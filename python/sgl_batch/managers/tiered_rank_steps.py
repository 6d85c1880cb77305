"""Owns a rank's part in the steps of its group where KV waits in the store that the ranks share.

Who keeps pages of a rank's device is that rank's own decision (core/residency), of which others learn by the number of
its rows before the next step: so a boundary ends without a forward pass.
"""

from __future__ import annotations

from typing import Any

from sgl_batch.core.rank_agreement import Step
from sgl_batch.managers.rank_group import RankGroup
from sgl_batch.managers.rank_messages import OrdersMessage
from sgl_batch.managers.rank_migration import RankMigration
from sgl_batch.managers.rank_steps import Part, RankSteps
from sgl_batch.managers.tiered_executor import TieredExecutor


class TieredRankSteps(RankSteps):
    """What comes back from the store joins before a step is agreed; none waits for it while any rank has rows."""

    def __init__(self, executor: TieredExecutor, group: RankGroup, migration: RankMigration) -> None:
        super().__init__(executor, group, migration)
        self._tiered = executor

    def _arrived(self, running: Any) -> Any:
        return self._tiered.join_returned(running)

    def _turn_page(self, orders: OrdersMessage, running: Any, step: Step) -> Part:
        running = self._tiered.turn_page(running, others_run=step.somebody_runs)
        return Part(batch=None, running=running, takes_part=False)
