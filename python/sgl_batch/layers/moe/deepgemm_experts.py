"""Owns expert compute by DeepGEMM's grouped GEMMs, and is the only importer of deep_gemm. Not yet run on a GPU.

It follows DeepGEMM's published interface; gather, scatter and sum are our Triton kernels. It rounds to bfloat16 between
its steps, also before the weights of the choices, so that it is less exact than the other runners.
"""

from __future__ import annotations

import torch

from sgl_batch.errors import ConfigError
from sgl_batch.layers.moe import triton_steps
from sgl_batch.layers.moe.clamped_experts import ClampedExperts
from sgl_batch.layers.moe.routed_rows import route

try:
    import deep_gemm
except ImportError as error:
    raise ConfigError(
        f"the expert runner deepgemm needs the package deep_gemm, which cannot be imported ({error}); install it on a "
        "machine with a Hopper or Blackwell GPU (pip install sgl-deep-gemm), or choose the expert runner triton"
    ) from error

# Rows of one expert start at a multiple of this, as DeepGEMM's contiguous layout needs it.
_BLOCK_ROWS = 128


def deepgemm_experts(
    x_TM: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    topk_weights_TK: torch.Tensor,
    topk_ids_TK: torch.Tensor,
    *,
    f32_output: bool = False,
    clamped: ClampedExperts | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute experts with DeepGEMM: an `ExpertRunner` for bfloat16 without biases.

    Raises ConfigError for another number type, or for biases.
    """
    if clamped is not None:
        raise ConfigError(
            "the expert runner deepgemm has no biases and no clamped activation, which this model's experts have: "
            "choose the expert runner triton"
        )
    if x_TM.dtype != torch.bfloat16 or w13.dtype != torch.bfloat16:
        raise ConfigError(
            f"the expert runner deepgemm computes in bfloat16, not on rows of {x_TM.dtype} with weights of "
            f"{w13.dtype}: give --dtype bfloat16, or choose the expert runner triton"
        )
    rows = route(topk_ids_TK, topk_weights_TK, num_experts=len(w13), block_rows=_BLOCK_ROWS)
    expert_B = torch.where(rows.block_expert_B < len(w13), rows.block_expert_B, -1)
    expert_S = expert_B[:, None].expand(-1, _BLOCK_ROWS).reshape(-1)
    x_SM = triton_steps.gather(x_TM if x_TM.stride(1) == 1 else x_TM.contiguous(), rows)
    gate_up_SJ = x_SM.new_empty(len(x_SM), w13.shape[1])
    deep_gemm.m_grouped_bf16_gemm_nt_contiguous(x_SM, w13, gate_up_SJ, expert_S)
    inter_SI = triton_steps.silu_mul(gate_up_SJ, rows)
    deep_gemm.m_grouped_bf16_gemm_nt_contiguous(inter_SI, w2, x_SM, expert_S)
    products_RM = triton_steps.scatter(x_SM, rows)
    out_TM = triton_steps.tree_sum(products_RM, rows, torch.float32 if f32_output else x_TM.dtype)
    return out_TM, rows.rows_per_expert
