"""Owns the steps of expert compute as calls of our Triton kernels, and their tiling. Not yet run on a GPU.

One tiling serves all sizes: a row's result depends neither on the other rows nor on their number. Shape suffixes: T
tokens, K experts per token, R = T * K rows, S cells of the layout, E experts, M hidden, I intermediate, J gate and up
together.
"""

from __future__ import annotations

from typing import Any

import torch
import triton

from sgl_batch.layers.moe import triton_kernels as kernels
from sgl_batch.layers.moe.clamped_experts import ClampedExperts
from sgl_batch.layers.moe.routed_rows import RoutedRows, tree_paths

# A tile for the tensor cores of any GPU since Ampere; not tuned on one.
BLOCK_ROWS = 64
_TILE: dict[str, Any] = {"H": BLOCK_ROWS, "N": 64, "D": 64, "num_warps": 4, "num_stages": 3}
# For kernels that only move rows. A block's rows are a multiple of these.
_ROW_TILE = {"H": 32, "N": 128}
_COLUMNS = 256
# Triton's interpreter multiplies the bit patterns of bfloat16 numbers as integers, and truncates to bfloat16 instead of
# rounding. Under it, products are of float32 numbers, and torch rounds the stored results.
_INTERPRETED = bool(triton.knobs.runtime.interpret)


def _to_store(dtype: torch.dtype) -> torch.dtype:
    """Return the number type in which a kernel stores results that become `dtype`."""
    return torch.float32 if _INTERPRETED else dtype


def _blocks(size: int, block: int) -> int:
    return -(-size // block)


def gate_up(
    x_TM: torch.Tensor, w13: torch.Tensor, rows: RoutedRows, clamped: ClampedExperts | None = None
) -> torch.Tensor:
    """Compute SiLU(gate) * up of each cell's token [S, I], with weights [E, 2I, M]; undefined in an empty cell."""
    bias, alpha, limit = (w13, 1.0, 1.0) if clamped is None else (clamped.w13_bias, clamped.alpha, clamped.limit)
    experts, double, hidden = w13.shape
    inter_SI = torch.empty(len(rows.cell_row_S), double // 2, dtype=_to_store(x_TM.dtype), device=x_TM.device)
    grid = (len(rows.block_expert_B), _blocks(double // 2, _TILE["N"]))
    top_k = rows.ids_TK.shape[1]
    kernels.gate_up_kernel[grid](
        x_TM, w13, inter_SI, rows.cell_row_S, rows.block_expert_B, x_TM.stride(0), top_k, hidden, double // 2, experts,
        bias, alpha, limit, CLAMPED=clamped is not None, WIDEN=_INTERPRETED, **_TILE,
    )  # fmt: skip
    return inter_SI.to(x_TM.dtype)


def down(
    inter_SI: torch.Tensor, w2: torch.Tensor, rows: RoutedRows, clamped: ClampedExperts | None = None
) -> torch.Tensor:
    """Compute each row's weighted down product with [E, M, I]: float32 [R, M], undefined for a row of no expert."""
    experts, hidden, width = w2.shape
    products_RM = torch.empty(rows.ids_TK.numel(), hidden, dtype=torch.float32, device=w2.device)
    grid = (len(rows.block_expert_B), _blocks(hidden, _TILE["N"]))
    kernels.down_kernel[grid](
        inter_SI, w2, rows.weights_TK, products_RM, rows.cell_row_S, rows.block_expert_B, hidden, width, experts,
        w2 if clamped is None else clamped.w2_bias, BIASED=clamped is not None, WIDEN=_INTERPRETED, **_TILE,
    )  # fmt: skip
    return products_RM


def gather(x_TM: torch.Tensor, rows: RoutedRows) -> torch.Tensor:
    """Return the combined batch in its layout [S, M]: each cell's token, 0 in an empty cell, undefined if idle."""
    top_k, hidden = rows.ids_TK.shape[1], x_TM.shape[1]
    out_SM = torch.empty(len(rows.cell_row_S), hidden, dtype=x_TM.dtype, device=x_TM.device)
    kernels.gather_kernel[_row_grid(rows, hidden)](
        x_TM, out_SM, rows.cell_row_S, rows.block_expert_B, rows.block_rows, x_TM.stride(0), top_k, hidden,
        len(rows.rows_per_expert), **_ROW_TILE,
    )  # fmt: skip
    return out_SM


def scatter(outputs_SM: torch.Tensor, rows: RoutedRows) -> torch.Tensor:
    """Return each row's weighted output: float32 [R, M], undefined for a row of no expert."""
    hidden = outputs_SM.shape[1]
    products_RM = torch.empty(rows.ids_TK.numel(), hidden, dtype=torch.float32, device=outputs_SM.device)
    kernels.scatter_kernel[_row_grid(rows, hidden)](
        outputs_SM, rows.weights_TK, products_RM, rows.cell_row_S, rows.block_expert_B, rows.block_rows, hidden,
        len(rows.rows_per_expert), **_ROW_TILE,
    )  # fmt: skip
    return products_RM


def silu_mul(gate_up_SJ: torch.Tensor, rows: RoutedRows) -> torch.Tensor:
    """Compute SiLU of the first half of each cell times the second half, undefined in idle blocks."""
    width = gate_up_SJ.shape[1] // 2
    inter_SI = torch.empty(len(gate_up_SJ), width, dtype=_to_store(gate_up_SJ.dtype), device=gate_up_SJ.device)
    kernels.silu_mul_kernel[_row_grid(rows, width)](
        gate_up_SJ, inter_SI, rows.block_expert_B, rows.block_rows, width, len(rows.rows_per_expert), **_ROW_TILE
    )
    return inter_SI.to(gate_up_SJ.dtype)


def _row_grid(rows: RoutedRows, columns: int) -> tuple[int, int]:
    """Return the grid whose programs have some rows of one block, in some columns."""
    return len(rows.cell_row_S) // _ROW_TILE["H"], _blocks(columns, _ROW_TILE["N"])


def tree_sum(products_RM: torch.Tensor, rows: RoutedRows, dtype: torch.dtype) -> torch.Tensor:
    """Sum each token's rows [T, M] in the order of the native kernels: a binary tree over the experts' ids."""
    tokens, top_k = rows.ids_TK.shape
    hidden, experts = products_RM.shape[1], len(rows.rows_per_expert)
    out_TM = torch.empty(tokens, hidden, dtype=_to_store(dtype), device=products_RM.device)
    paths = tree_paths(experts, products_RM.device)
    choices = 1 << (top_k - 1).bit_length()
    kernels.tree_sum_kernel[(tokens, _blocks(hidden, _COLUMNS))](
        products_RM, rows.ids_TK, paths, out_TM, top_k, hidden, experts, C=choices, N=_COLUMNS
    )
    return out_TM.to(dtype)
