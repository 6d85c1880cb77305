"""Owns expert compute over a combined batch by our Triton kernels. It has run under Triton's interpreter only."""

from __future__ import annotations

import torch

from sgl_batch.layers.moe import triton_steps
from sgl_batch.layers.moe.clamped_experts import ClampedExperts
from sgl_batch.layers.moe.routed_rows import route


def triton_experts(
    x_TM: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    topk_weights_TK: torch.Tensor,
    topk_ids_TK: torch.Tensor,
    *,
    f32_output: bool = False,
    clamped: ClampedExperts | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute experts with our Triton kernels: an `ExpertRunner`. It never waits for the GPU.

    Two grouped GEMMs, which gather and scatter the rows, and then the tree sum.
    """
    if not len(x_TM):
        return x_TM.to(torch.float32 if f32_output else x_TM.dtype), torch.zeros(
            len(w13), dtype=torch.int64, device=w13.device
        )
    rows = route(topk_ids_TK, topk_weights_TK, num_experts=len(w13), block_rows=triton_steps.BLOCK_ROWS)
    inter_SI = triton_steps.gate_up(x_TM if x_TM.stride(1) == 1 else x_TM.contiguous(), w13, rows, clamped)
    products_RM = triton_steps.down(inter_SI, w2, rows, clamped)
    out_TM = triton_steps.tree_sum(products_RM, rows, torch.float32 if f32_output else x_TM.dtype)
    return out_TM, rows.rows_per_expert
