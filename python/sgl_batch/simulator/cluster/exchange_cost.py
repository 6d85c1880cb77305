"""Owns the seconds in which the ranks of an instance exchange rows in a layer, within nodes and between them."""

from __future__ import annotations

from dataclasses import dataclass

from sgl_batch.planner.model_layers import ModelLayers
from sgl_batch.simulator.cluster.engine_settings import ALL_TO_ALL, EngineSettings
from sgl_batch.simulator.cluster.rates import Rates

_SUM_BYTES = 2.0


@dataclass(frozen=True, slots=True)
class ExchangeTime:
    """Seconds of one layer's exchange: of its bytes, and of its calls beside them."""

    bytes_s: float
    calls_s: float

    @property
    def seconds(self) -> float:
        """Return all seconds."""
        return self.bytes_s + self.calls_s


NO_EXCHANGE = ExchangeTime(0.0, 0.0)


class ExchangeCost:
    """Seconds of exchanges among ranks. Bytes within a node and between nodes move at the same time.

    Args:
        model: The model.
        engine: Its form of exchange.
        rates: Of one rank.
        ranks: Of the instance.
    """

    def __init__(self, model: ModelLayers, engine: EngineSettings, rates: Rates, *, ranks: int) -> None:
        self._model, self._engine, self._rates, self._ranks = model, engine, rates, ranks
        self._call_s = engine.exchange_s.best * rates.nodes
        self._numbers = model.hidden_bytes / _SUM_BYTES

    def of_rows(self, mine: float, everyones: float, *, decodes_alone: bool) -> ExchangeTime:
        """Return the time in which rows reach their experts, and sums come back.

        `mine`: rows of the busiest rank; `everyones`: of all ranks.
        """
        if self._ranks == 1 or everyones <= 0:
            return NO_EXCHANGE
        if self._engine.exchange == ALL_TO_ALL:
            return ExchangeTime(self._all_to_all_s(mine), 2 * self._call_s)
        rows, times = everyones, self._engine.ragged_gather
        if decodes_alone:
            times = 1.0
            rows = max(mine * self._ranks, everyones) if self._engine.padded_gather else everyones
        # Gathered rows in, and as many sums out.
        return ExchangeTime(2 * times * self._gather_s(rows * self._model.hidden_bytes), 2 * self._call_s)

    def of_sums(self, rows: float) -> ExchangeTime:
        """Return the time in which tensor parallel ranks add up the sums of rows, twice a layer."""
        if self._ranks == 1 or rows <= 0:
            return NO_EXCHANGE
        return ExchangeTime(4 * self._gather_s(rows * self._model.hidden_bytes), 2 * self._call_s)

    def _gather_s(self, num_bytes: float) -> float:
        """Return the seconds of an all-gather, or of a scatter of sums, of so many bytes of all ranks together.

        A rank gets all bytes but its own. Those of other nodes come in once, each GPU of a node getting its part.
        """
        rates = self._rates
        within = num_bytes * (self._ranks - 1) / self._ranks / rates.nvlink
        between = num_bytes * (rates.nodes - 1) / rates.nodes / rates.local / rates.network
        return max(within if rates.local > 1 else 0.0, between)

    def _all_to_all_s(self, rows: float) -> float:
        """Return the seconds of a dispatch and a combination of a rank's rows.

        A row goes once to each other node that has one of its experts, and there to each such rank.
        """
        rates, chosen = self._rates, self._model.top_k
        size = self._numbers * (self._engine.dispatch_bytes + _SUM_BYTES)
        ranks_hit = (self._ranks - 1) * (1.0 - (1.0 - 1.0 / self._ranks) ** chosen)
        nodes_hit = (rates.nodes - 1) * (1.0 - (1.0 - 1.0 / rates.nodes) ** chosen)
        within = rows * ranks_hit * size / rates.nvlink if rates.local > 1 else 0.0
        return max(within, rows * nodes_hit * size / rates.network)
