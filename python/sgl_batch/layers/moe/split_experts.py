"""Owns one rank's columns of every expert, for passes of few rows that a set of ranks shares (BatchGen 4.2, partition).

Experts lie whole on the ranks. Of the few that a row chooses, one rank has more than another, and the others wait for
it. With its columns of all experts, each rank computes the same part of each:

    gate and up: some intermediate channels of each chosen expert -> gather -> rows between the products
    down:        some outputs of each chosen expert, added up     -> gather -> the sums

No sum is split, so that results have the bits of experts that are computed whole. The columns are copies, which take as
much memory as the rank's own experts. Shape suffixes: T tokens, K experts per token, E experts, M hidden,
I intermediate.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from sgl_batch.kernel_loader import native_kernels
from sgl_batch.layers.column_split import ColumnSplit
from sgl_batch.layers.packed_weights import PANEL, PackedWeights
from sgl_batch.memory.huge_pages import prefer_huge_pages
from sgl_batch.metrics.counters import Counters
from sgl_batch.sglang_adapter.types.models import ExpertLayer

logger = logging.getLogger(__name__)

MOST_ROWS = 64
"""The most rows of a pass with split experts. With more, the ranks' own experts have about as many of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Columns:
    """This rank's columns of all experts of a layer, packed: w13 [E, 2C, M], w2 [E, C, I]."""

    w13: torch.Tensor
    w2: torch.Tensor


class SplitExperts:
    """This rank's columns of the experts of all layers, in a set of all ranks.

    Args:
        layers: the model's expert layers; each rank has equal parts of the experts, in the order of the ranks.
        weights: where they are packed.
        split: the set.
        counters: counts expert calls.
    """

    def __init__(
        self, layers: Sequence[ExpertLayer], weights: PackedWeights, split: ColumnSplit, counters: Counters
    ) -> None:
        self._layers, self._weights, self._split, self._counters = layers, weights, split, counters
        self._obstacle = _obstacle(layers, weights, split.size)
        self._columns: dict[int, _Columns] = {}
        self._version = -1
        if self._obstacle is not None:
            logger.warning("partition_experts is split, and ranks compute their own experts: %s", self._obstacle)

    def prepare(self) -> None:
        """Copy the columns if they are not there, or not those of the present weights. All ranks of the set call it."""
        if self._obstacle is not None:
            return
        is_current = torch.tensor([[int(self._version == self._weights.version)]])
        if bool(self._split.of_each(is_current).all()):
            return
        began = time.perf_counter()
        self._columns.clear()
        for layer in self._layers:
            self._columns[layer.w13_weight.data_ptr()] = self._copied(layer)
        self._version = self._weights.version
        num_bytes = sum(one.w13.nbytes + one.w2.nbytes for one in self._columns.values())
        logger.info(
            "columns of all experts for partitions: %.2f GiB in %.1f s",
            num_bytes / (1 << 30),
            time.perf_counter() - began,
        )

    def takes(self, layer: ExpertLayer, rows: int) -> bool:
        """Return whether a pass of so many rows computes this layer's experts with its columns here."""
        is_current = self._version == self._weights.version
        return is_current and rows <= MOST_ROWS and layer.w13_weight.data_ptr() in self._columns

    def run(
        self, layer: ExpertLayer, x_TM: torch.Tensor, weights_TK: torch.Tensor, ids_TK: torch.Tensor
    ) -> torch.Tensor:
        """Return the sums [T, M] in float32 of rows that all ranks have. `ids_TK`: among all experts."""
        kernels, split, clock = native_kernels(), self._split, self._counters.clock
        assert kernels is not None, "without kernels nothing is packed"
        columns = self._columns[layer.w13_weight.data_ptr()]
        choice = weights_TK.to(torch.float32).contiguous(), ids_TK.to(torch.int32).contiguous()
        inter, hidden = columns.w2.shape[2], columns.w13.shape[2]
        with clock.part("experts"):
            own_RC, rows_per_expert = kernels.experts_up(x_TM.contiguous(), columns.w13, *choice)
        self._counters.add("split_expert_calls")
        local = len(rows_per_expert) // split.size
        self._counters.add_expert_call(rows_per_expert[split.rank * local : (split.rank + 1) * local])
        with clock.part("exchange"):
            rows_RI = split.columns(inter, PANEL, lambda first, last: own_RC)
        with clock.part("experts"):
            own_TC = kernels.experts_down(rows_RI, columns.w2, *choice)
        with clock.part("exchange"):
            return split.columns(hidden, PANEL, lambda first, last: own_TC)

    def _copied(self, layer: ExpertLayer) -> _Columns:
        """Exchange the columns of a layer with all ranks of the set."""
        w13, w2 = (self._weights.matrices_of(one) for one in (layer.w13_weight, layer.w2_weight))
        return _Columns(w13=self._columns_of(w13).flatten(1, 2), w2=self._columns_of(w2)[:, 0])

    def _columns_of(self, own: torch.Tensor) -> torch.Tensor:
        """Return this rank's columns [E, B, C, K] of all ranks' matrices, of which `own` [own E, B, N, K] are here."""
        found = own.new_empty(0)
        for rank in range(self._split.size):
            first, last = self._split.shares(own.shape[2], PANEL)[rank : rank + 2]
            # Panels lie one after the other: whole ones can be taken out of a packed matrix.
            sent = own[:, :, first:last].contiguous()
            by_column = self._split.of_each(sent.view(-1, sent.shape[-1]))
            if rank == self._split.rank:
                found = own.new_empty(self._split.size * len(own), *sent.shape[1:])
                prefer_huge_pages(found)
                found.view(self._split.size, -1, sent.shape[-1]).copy_(by_column.transpose(0, 1))
        return found


def _obstacle(layers: Sequence[ExpertLayer], weights: PackedWeights, ranks: int) -> str | None:
    """Return why the ranks cannot have columns of all experts; None if they can."""
    for layer in layers:
        if layer.w13_weight not in weights:
            return "their weights are not packed for the native kernels, or are streamed"
        if not weights.is_plain_number(layer.w13_weight):
            return "their weights are int8 or lossless12, or their activation is clamped"
        inter, hidden = layer.w2_weight.shape[2], layer.w2_weight.shape[1]
        if min(inter, hidden) < ranks * PANEL:
            return f"an expert has {min(inter, hidden)} columns, fewer than {PANEL} for each of {ranks} ranks"
    return None
