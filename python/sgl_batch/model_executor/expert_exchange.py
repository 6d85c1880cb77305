"""Owns the expert half of a layer whose experts lie on several ranks: route here, compute there, add up here.

Every rank takes part in every exchange, with zero rows if it has none. The ranks agree on the number of exchanges
before the step.
"""

from __future__ import annotations

import torch

from sgl_batch.layers.moe.expert_runner import ExpertCall
from sgl_batch.layers.moe.token_dispatcher import TokenDispatcher
from sgl_batch.metrics.counters import Counters
from sgl_batch.model_executor.families import ExpertBlock, Family
from sgl_batch.sglang_adapter.types.batches import ForwardBatch


class ExpertExchange:
    """Runs one dispatch, one combined expert call and one combine for the rows of all ranks.

    `expert_call` computes the experts that this rank holds.
    """

    def __init__(self, dispatcher: TokenDispatcher, expert_call: ExpertCall, counters: Counters) -> None:
        self._dispatcher, self._expert_call, self._counters = dispatcher, expert_call, counters

    def run(
        self, family: Family, layer: torch.nn.Module, hidden: torch.Tensor, batch: ForwardBatch | None
    ) -> torch.Tensor:
        """Run the expert half of `layer` for this rank's rows; a layer without experts needs no exchange."""
        block = family.expert_block(layer)
        if block is None:
            return family.expert_half(layer, hidden, batch) if len(hidden) else hidden
        return self._routed(block, hidden)

    def _routed(self, block: ExpertBlock, hidden: torch.Tensor) -> torch.Tensor:
        weights_TK, ids_TK = block.route(hidden)
        clock = self._counters.clock
        with clock.part("exchange"):
            received = self._dispatcher.dispatch(hidden, ids_TK, weights_TK)
        sums_RM = self._expert_call(block.experts, received.x_RM, received.weights_RK, received.ids_RK, f32_output=True)
        with clock.part("exchange"):
            out_TM = self._dispatcher.combine(sums_RM, received)
        clock.shift(self._dispatcher.take_waited_s(), source="exchange", target="stall")
        return add_shared(block, out_TM, hidden)


def add_shared(block: ExpertBlock, sums_TM: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    """Return a layer's output: the routed experts' sums in float32 plus its shared experts' output, rounded once."""
    if block.shared is not None and len(hidden):
        sums_TM = sums_TM + block.shared(hidden)
    return sums_TM.to(hidden.dtype)
