"""Owns what a layer waits for host memory: weights and KV that come over the link, and attention on the host."""

from __future__ import annotations

from dataclasses import dataclass

from sgl_batch.planner.candidate import DEVICE, STREAMED
from sgl_batch.planner.layouts import Layout
from sgl_batch.planner.model_layers import MOE, ModelLayers
from sgl_batch.simulator.cluster.engine_settings import EngineSettings
from sgl_batch.simulator.cluster.expert_cost import ExpertTime
from sgl_batch.simulator.cluster.rates import Rates
from sgl_batch.simulator.cluster.regime import HOST, Regime
from sgl_batch.simulator.work import PassWork


@dataclass(frozen=True, slots=True)
class Waits:
    """Seconds that a layer waits beyond its work on the device: for weights, for KV, and for attention on the host."""

    weights_s: float
    copies_s: float
    host_s: float


NO_WAITS = Waits(0.0, 0.0, 0.0)


class HostLink:
    """Seconds that layers wait for host memory.

    Args:
        model: The model, of one rank alone.
        mine: The model as a rank has it.
        engine: How copies run beside the device's work.
        layout: The ranks of an instance.
        regime: What is in host memory.
        rates: Of one rank.
        kv_layer_bytes: KV of a token in a layer, on one rank.
    """

    def __init__(
        self,
        model: ModelLayers,
        mine: ModelLayers,
        engine: EngineSettings,
        layout: Layout,
        regime: Regime,
        rates: Rates,
        kv_layer_bytes: float,
    ) -> None:
        self._model, self._mine, self._engine, self._layout = model, mine, engine, layout
        self._regime, self._rates, self._kv_bytes = regime, rates, kv_layer_bytes
        self._pieces = layout.ranks if layout.tensor or engine.tensor_experts else 1

    def waits(
        self, work: PassWork, kind: str, experts: ExpertTime, looked_at: float, device_s: float, *, alone: bool
    ) -> Waits:
        """Return what a layer waits beyond the device's work of `device_s`.

        Both directions of the link work at once. Of what goes on at one time, `overlap` of all but the longest hides.
        `looked_at`: tokens that decoded rows look at; `alone`: whether the rank computes its rows with all experts.
        """
        rates, regime, tokens = self._rates, self._regime, work.prompt_tokens + work.rows
        if not tokens:
            return NO_WAITS
        weights_s = self._fetched_bytes(kind, experts, alone=alone) / rates.link
        is_streamed = (regime.kv == STREAMED or work.streams) and regime.attention == DEVICE
        brought = looked_at * self._kv_bytes if is_streamed else 0.0
        host_s = 0.0
        if regime.attention == HOST and work.rows:
            flop_s = looked_at * self._mine.decode_flop / rates.host_flop
            host_s = max(looked_at * self._kv_bytes / rates.host_memory, flop_s)
            brought += 2 * work.rows * self._model.hidden_bytes
        stored = tokens * self._kv_bytes if regime.has_store else 0.0
        copies_s = max(brought / rates.link, stored / rates.link - weights_s)
        together = weights_s + copies_s + host_s
        if not together:
            return NO_WAITS
        longest = max(device_s, weights_s + copies_s, host_s)
        whole_s = longest + (1 - self._engine.overlap.best) * (device_s + together - longest)
        share = (whole_s - device_s) / together
        return Waits(share * weights_s, share * copies_s, share * host_s)

    def _fetched_bytes(self, kind: str, experts: ExpertTime, *, alone: bool) -> float:
        """Return the bytes of a layer's weights that come from host memory in a pass."""
        model, streamed, ranks = self._model, self._regime.streamed_weights, self._layout.ranks
        attention = streamed * self._mine.attention_bytes if self._engine.by_layer else 0.0
        if kind != MOE:
            return attention
        if alone:
            # What the rank has for decode stays where it is.
            resident = (1 - streamed) * model.experts / ranks
            return attention + max(experts.reached - resident, 0.0) * model.expert_bytes_each
        asked = model.experts * self._pieces / ranks if self._engine.by_layer else experts.reached
        return attention + streamed * asked * model.expert_bytes_each / self._pieces
