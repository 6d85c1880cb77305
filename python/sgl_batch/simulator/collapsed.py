"""Owns ranks that stand for others: one rank of an instance, whose others have the same work at the same time."""

from __future__ import annotations

from dataclasses import replace

from sgl_batch.planner.pass_cost import PassTime
from sgl_batch.simulator.work import Costs, PassWork


class Collapsed:
    """Costs of an instance of which one rank is simulated, as if `ranks` did what it does."""

    def __init__(self, costs: Costs, ranks: int) -> None:
        self.sources = costs.sources
        self._costs, self._ranks = costs, ranks

    def of_pass(self, work: PassWork) -> PassTime:
        return self._costs.of_pass(replace(work, all_rows=work.all_rows * self._ranks))

    def of_copy(self, tokens: float) -> PassTime:
        return self._costs.of_copy(tokens)

    def of_move(self, tokens: float) -> PassTime:
        return self._costs.of_move(tokens)
