"""Owns the expert half of a layer whose experts lie on several ranks: route here, compute there, add up here.

Every rank takes part in every exchange, with zero rows if it has none. The ranks agree on the number of exchanges
before the step. In a pass that a set of ranks shares, each rank has all rows: a set of all ranks exchanges partial sums
alone; of a smaller one, the first rank exchanges the rows and hands the sums on.
"""

from __future__ import annotations

import torch

from sgl_batch.core.partition_memory import SUMMED_ROWS
from sgl_batch.kernel_loader import native_kernels
from sgl_batch.layers.column_split import ColumnSplit
from sgl_batch.layers.moe.expert_runner import ExpertCall
from sgl_batch.layers.moe.token_dispatcher import TokenDispatcher
from sgl_batch.metrics.counters import Counters
from sgl_batch.model_executor.families import ExpertBlock, Family
from sgl_batch.model_executor.partition_set import PartitionSet
from sgl_batch.sglang_adapter.types.batches import ForwardBatch


class ExpertExchange:
    """Runs one dispatch, one combined expert call and one combine for the rows of all ranks.

    `expert_call` computes the experts that this rank holds.
    """

    def __init__(self, dispatcher: TokenDispatcher, expert_call: ExpertCall, counters: Counters) -> None:
        self._dispatcher, self._expert_call, self._counters = dispatcher, expert_call, counters

    def run(
        self,
        family: Family,
        layer: torch.nn.Module,
        hidden: torch.Tensor,
        batch: ForwardBatch | None,
        partition: PartitionSet | None = None,
    ) -> torch.Tensor:
        """Run the expert half of `layer` for this rank's rows; a layer without experts needs no exchange.

        `partition`: the set of ranks that have the same rows.
        """
        block = family.expert_block(layer)
        if block is None:
            return family.expert_half(layer, hidden, batch) if len(hidden) else hidden
        weights_TK, ids_TK = block.route(hidden)
        if partition is None:
            sums_TM = self._exchanged(block, hidden, weights_TK, ids_TK)
        elif partition.experts is not None and partition.experts.takes(block.experts, len(hidden)):
            sums_TM = partition.experts.run(block.experts, hidden, weights_TK, ids_TK)
        elif partition.is_all:
            sums_TM = self._of_all_shards(block, hidden, weights_TK, ids_TK, partition.split)
        else:
            sums_TM = self._of_first_rank(block, hidden, weights_TK, ids_TK, partition.split)
        return add_shared(block, sums_TM, hidden)

    def _exchanged(
        self, block: ExpertBlock, hidden: torch.Tensor, weights_TK: torch.Tensor, ids_TK: torch.Tensor
    ) -> torch.Tensor:
        """Return the sums [T, M] in float32 of rows that this rank alone has."""
        clock = self._counters.clock
        with clock.part("exchange"):
            received = self._dispatcher.dispatch(hidden, ids_TK, weights_TK)
        sums_RM = self._expert_call(block.experts, received.x_RM, received.weights_RK, received.ids_RK, f32_output=True)
        with clock.part("exchange"):
            out_TM = self._dispatcher.combine(sums_RM, received)
        clock.shift(self._dispatcher.take_waited_s(), source="exchange", target="stall")
        return out_TM

    def _of_all_shards(
        self,
        block: ExpertBlock,
        hidden: torch.Tensor,
        weights_TK: torch.Tensor,
        ids_TK: torch.Tensor,
        split: ColumnSplit,
    ) -> torch.Tensor:
        """Return the sums of rows that all ranks have: each computes its own experts for them."""
        assert (split.rank, split.size) == (self._dispatcher.shard, self._dispatcher.num_shards), "ranks hold shards"
        kernels, local = native_kernels(), self._dispatcher.num_local_experts
        assert kernels is not None, "ranks share passes where the native kernels are"
        ids_TK = ids_TK.to(torch.int32).contiguous()
        own_TK = kernels.own_choices(ids_TK, self._dispatcher.shard * local, local)
        partial_TM = self._expert_call(block.experts, hidden, weights_TK, own_TK, f32_output=True)
        with self._counters.clock.part("exchange"):
            for part_TM, part_TK in zip(partial_TM.split(SUMMED_ROWS), ids_TK.split(SUMMED_ROWS), strict=True):
                kernels.sum_partials_(part_TM, split.of_each(part_TM), part_TK, self._dispatcher.num_experts)
            return partial_TM

    def _of_first_rank(
        self,
        block: ExpertBlock,
        hidden: torch.Tensor,
        weights_TK: torch.Tensor,
        ids_TK: torch.Tensor,
        split: ColumnSplit,
    ) -> torch.Tensor:
        """Return the sums of rows that the ranks of a set have, which its first rank exchanges with all ranks."""
        leads = split.rank == 0
        rows = slice(None) if leads else slice(0)
        sums_TM = self._exchanged(block, hidden[rows], weights_TK[rows], ids_TK[rows])
        with self._counters.clock.part("exchange"):
            return split.of_first(sums_TM if leads else None, (len(hidden), hidden.shape[1]), torch.float32)


def add_shared(block: ExpertBlock, sums_TM: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    """Return a layer's output: the routed experts' sums in float32 plus its shared experts' output, rounded once."""
    if block.shared is not None and len(hidden):
        sums_TM = sums_TM + block.shared(hidden)
    return sums_TM.to(hidden.dtype)
