"""Owns ranks that stand for others: one rank of several that have sequences of the same lengths."""

from __future__ import annotations

from dataclasses import replace

from sgl_batch.planner.pass_cost import PassTime
from sgl_batch.simulator.work import Costs, PassWork


class Collapsed:
    """Costs of an instance in which each simulated rank stands for `ranks`, which do what it does at the same time.

    Ranks with the same lengths do, but for sequences that move between them. Ranks whose lengths are only drawn alike
    do not: all wait for the busiest one, and the busiest of few is less busy than that of many.
    """

    def __init__(self, costs: Costs, ranks: int) -> None:
        self.sources = costs.sources
        self._costs, self._ranks = costs, ranks

    def of_pass(self, work: PassWork) -> PassTime:
        return self._costs.of_pass(replace(work, all_rows=work.all_rows * self._ranks))

    def of_copy(self, tokens: float) -> PassTime:
        return self._costs.of_copy(tokens)

    def of_move(self, tokens: float) -> PassTime:
        return self._costs.of_move(tokens)

    def of_boundary(self) -> PassTime:
        return self._costs.of_boundary()
