"""Owns the layout of a combined batch for grouped GEMMs: its rows sorted by expert, in blocks of one expert each.

It never waits for the device: sizes are bounds that follow from shapes, and unused blocks at the end are marked idle.
Shape suffixes: T tokens, K experts per token, R = T * K routed rows, E experts, S cells of the layout, B blocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutedRows:
    """Row t * K + i is token t's i-th choice in the order of its experts' ids; choices of no expert come last.

    Cell s of the layout lies in block s // block_rows. `cell_row_S`: the row in each cell, -1 for none.
    `block_expert_B`: the expert of each block, E for an idle block; idle blocks are at the end.
    """

    block_rows: int
    ids_TK: torch.Tensor  # int32, E for a choice of no expert
    weights_TK: torch.Tensor  # float32
    rows_per_expert: torch.Tensor  # int64 [E]
    cell_row_S: torch.Tensor  # int32
    block_expert_B: torch.Tensor  # int32


def route(topk_ids_TK: torch.Tensor, topk_weights_TK: torch.Tensor, *, num_experts: int, block_rows: int) -> RoutedRows:
    """Sort the rows by expert, and those of an expert by token. A choice with a negative id is of no expert."""
    num_rows, device = topk_ids_TK.numel(), topk_ids_TK.device
    ids_TK, order_TK = torch.where(topk_ids_TK < 0, num_experts, topk_ids_TK).to(torch.int32).sort(dim=1, stable=True)
    sorted_R, order_R = ids_TK.flatten().sort(stable=True)
    starts_E1 = torch.searchsorted(sorted_R, torch.arange(num_experts + 1, device=device, dtype=torch.int32))
    rows_per_expert = starts_E1.diff()
    last_block_E = torch.cumsum((rows_per_expert + block_rows - 1) // block_rows, 0)
    num_blocks = num_rows // block_rows + min(num_experts, num_rows)
    block_expert_B = torch.searchsorted(last_block_E, torch.arange(num_blocks, device=device), right=True)
    # The cell of an expert's first row, less that row's index in sorted order; rows of no expert go past the end.
    first_cell_E = torch.cat((last_block_E.new_zeros(1), last_block_E)) * block_rows - starts_E1
    cell_R = torch.arange(num_rows, device=device) + first_cell_E[sorted_R.long()]
    num_cells = num_blocks * block_rows
    cell_R = torch.where(sorted_R < num_experts, cell_R, num_cells)
    cell_row = torch.full((num_cells + 1,), -1, dtype=torch.int32, device=device)
    cell_row[cell_R] = order_R.to(torch.int32)
    return RoutedRows(
        block_rows=block_rows,
        ids_TK=ids_TK,
        weights_TK=topk_weights_TK.to(torch.float32).gather(1, order_TK),
        rows_per_expert=rows_per_expert,
        cell_row_S=cell_row[:-1],
        block_expert_B=block_expert_B.to(torch.int32),
    )


@cache
def tree_paths(num_experts: int, device: torch.device) -> torch.Tensor:
    """Return each expert's path through the halvings of [0, E), one bit for each halving from the top, as int32.

    The middle one of an odd number belongs to the first half. Two experts part at the highest bit in which their paths
    differ.
    """
    spans, paths = [(0, num_experts)], [0] * num_experts
    while any(high - low > 1 for low, high in spans):
        halves = []
        for low, high in spans:
            middle = low + (high - low + 1) // 2
            for expert in range(low, high):
                paths[expert] = 2 * paths[expert] + (high - low > 1 and expert >= middle)
            halves += [(low, middle), (middle, high)] if high - low > 1 else [(low, high)]
        spans = halves
    return torch.tensor(paths, dtype=torch.int32, device=device)
