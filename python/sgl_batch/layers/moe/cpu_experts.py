"""Owns expert compute over a combined batch in plain torch: one GEMM pair for each expert that has rows.

Shape suffixes: T tokens, K experts per token, R = T * K routed rows, E experts, M hidden, I intermediate.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from sgl_batch.layers.cpu_gemm import compute_dtype, linear
from sgl_batch.layers.moe.clamped_experts import ClampedExperts


def _expert(
    rows_RM: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor, expert: int, clamped: ClampedExperts | None
) -> torch.Tensor:
    """Compute one expert for its rows: gate and up projection, activation, down projection."""
    gate_up_RJ = linear(rows_RM, w13[expert])
    if clamped is not None:
        mixed_RI = clamped.mix(gate_up_RJ.float() + clamped.w13_bias[expert])
        out_RM = linear(mixed_RI.to(rows_RM.dtype), w2[expert])
        return (out_RM.float() + clamped.w2_bias[expert]).to(rows_RM.dtype)
    gate, up = gate_up_RJ.chunk(2, dim=-1)
    return linear(F.silu(gate) * up, w2[expert])


def combined_experts(
    x_TM: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    topk_weights_TK: torch.Tensor,
    topk_ids_TK: torch.Tensor,
    *,
    f32_output: bool = False,
    clamped: ClampedExperts | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute experts with torch operators: an `ExpertRunner`.

    Rows are sorted by expert, so that each expert sees all its rows of the combined batch at once. A token's rows are
    added up in order of K in float32: the result does not depend on the order in which experts run.
    """
    num_tokens, top_k = topk_ids_TK.shape
    ids_R = topk_ids_TK.reshape(-1).to(torch.int64)
    order_R = torch.argsort(ids_R, stable=True)
    num_absent = int((ids_R < 0).sum())
    rows_per_expert = torch.bincount(ids_R[order_R[num_absent:]], minlength=w13.shape[0])
    # Converted once for all experts, so that no product converts its rows again.
    sorted_RM = x_TM.to(compute_dtype(x_TM.dtype))[order_R // top_k]
    out_RM = torch.empty_like(sorted_RM)
    out_RM[:num_absent] = 0
    start = num_absent
    for expert, count in enumerate(rows_per_expert.tolist()):
        if count:
            rows = slice(start, start + count)
            out_RM[rows] = _expert(sorted_RM[rows], w13, w2, expert, clamped)
            start += count
    out_RM[num_absent:] *= topk_weights_TK.reshape(-1)[order_R[num_absent:], None].to(out_RM.dtype)
    sorted_index_R = torch.empty_like(order_R)
    sorted_index_R[order_R] = torch.arange(len(order_R), device=order_R.device)
    by_token_TKM = out_RM[sorted_index_R].view(num_tokens, top_k, w2.shape[1])
    out_TM = by_token_TKM.sum(1, dtype=torch.float32)
    return out_TM if f32_output else out_TM.to(x_TM.dtype), rows_per_expert
