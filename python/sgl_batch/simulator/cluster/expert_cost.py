"""Owns the seconds of a layer's routed experts on one rank: their work, tiles that are not full, and uneven choices."""

from __future__ import annotations

import math
from dataclasses import dataclass

from sgl_batch.planner.model_layers import ModelLayers
from sgl_batch.simulator.cluster.engine_settings import EngineSettings
from sgl_batch.simulator.cluster.rates import Rates


@dataclass(frozen=True, slots=True)
class ExpertTime:
    """Seconds of the experts of one layer on the busiest rank.

    Attributes:
        memory_s, compute_s: Of reading the experts that get rows, and of the products of these rows, evenly spread.
        work_s: Of both together.
        tiles_s: What rows add that fill up tiles.
        skew_s: What the rank adds whose experts are chosen most.
        calls_s: Of each expert beside its work.
        reached: Experts of the rank that get rows.
    """

    memory_s: float
    compute_s: float
    work_s: float
    tiles_s: float
    skew_s: float
    calls_s: float
    reached: float

    @property
    def seconds(self) -> float:
        """Return all seconds."""
        return self.work_s + self.tiles_s + self.skew_s + self.calls_s


NO_EXPERTS = ExpertTime(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)


class ExpertCost:
    """Seconds of the routed experts of a layer.

    Args:
        model: The model, of one rank alone.
        engine: How its kernels compute experts.
        rates: Of one rank.
        ranks: That share the experts in an expert-parallel pass.
        is_sliced: Whether each of them has a slice of every expert.
    """

    def __init__(
        self, model: ModelLayers, engine: EngineSettings, rates: Rates, *, ranks: int, is_sliced: bool
    ) -> None:
        self._model, self._rates, self._ranks, self._is_sliced = model, rates, ranks, is_sliced
        self._tile, self._expert_s = float(engine.tile_rows), engine.expert_s.best
        self._unevenness = engine.unevenness.best

    def shared(self, rows: float) -> ExpertTime:
        """Return the time of a rank's share of the experts, with so many rows of all ranks together."""
        if self._is_sliced:
            return self._time(rows, part=1.0, pieces=self._ranks)
        return self._time(rows, part=1.0 / self._ranks, ranks=self._ranks)

    def alone(self, rows: float) -> ExpertTime:
        """Return the time of all experts on one rank, with rows of its own."""
        return self._time(rows, part=1.0)

    def _time(self, rows: float, *, part: float, pieces: int = 1, ranks: int = 1) -> ExpertTime:
        """Return the time of this part of the experts, each in so many pieces. `ranks`: that wait for the busiest."""
        model = self._model
        if not model.experts or rows <= 0:
            return NO_EXPERTS
        hit = 1.0 - float((1.0 - model.top_k / model.experts) ** rows)
        reached = model.experts * part * hit
        each = rows * model.top_k / model.experts / hit
        size = model.expert_bytes_each / pieces
        memory_s = reached * size / self._rates.memory
        plain_s = self._products_s(reached, size, each)
        work_s = self._rates.together(memory_s, plain_s)
        with_tiles = self._rates.together(memory_s, self._products_s(reached, size, self._in_tiles(each)))
        with_skew, skew = with_tiles, self._skew(ranks, each)
        if skew > 1.0:
            most_s = min(model.experts * part, reached * skew) * size / self._rates.memory
            with_skew = self._rates.together(most_s, self._products_s(reached, size, self._in_tiles(each * skew)))
        return ExpertTime(
            memory_s=memory_s,
            compute_s=plain_s,
            work_s=work_s,
            tiles_s=with_tiles - work_s,
            skew_s=with_skew - with_tiles,
            calls_s=reached * self._expert_s,
            reached=reached,
        )

    def _skew(self, ranks: int, each: float) -> float:
        """Return the rows of the busiest rank's experts, of the mean, where an expert has so many rows on average.

        A rank's rows are a sum over its experts, which differ in popularity and by chance; of several such sums the
        largest is expected so far above the mean as normal ones are.
        """
        if ranks == 1:
            return 1.0
        spread = math.sqrt((self._unevenness**2 + 1.0 / each) * ranks / self._model.experts)
        return min(1.0 + spread * math.sqrt(2.0 * math.log(ranks)), float(ranks))

    def _in_tiles(self, rows: float) -> float:
        """Return the rows that a kernel computes for so many of one expert: on average half a tile more."""
        return self._tile * max(1.0, rows / self._tile + 0.5)

    def _products_s(self, experts: float, size: float, rows: float) -> float:
        """Return the seconds of products of so many rows with each of so many experts."""
        number = self._model.expert_number_bytes
        return experts * 2.0 * size / number * rows / (self._rates.products(number) * self._rates.experts)
