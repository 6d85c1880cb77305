"""Owns the projections around latent attention (MLA) on a CPU: from hidden rows to queries over latents, and back.

Queries are projected to the latent's space (DeepSeek-V2, section 2.1.2) in prefill and in decode, so that a token's
result is the same however its sequence is cut. The attention backend computes the attention itself.
Shape suffixes: T rows, H heads, N channels of a head without position, V channels of a value, R latent, P rotated.
"""

from __future__ import annotations

from typing import Any

import torch

from sgl_batch.layers.packed_weights import PackedWeights


def pack(module: Any, weights: PackedWeights) -> None:
    """Pack the weights that `run` multiplies by head."""
    for weight_HNK in _by_head(module):
        weights.add_by_head(weight_HNK)


def run(module: Any, weights: PackedWeights, positions: torch.Tensor, hidden: torch.Tensor, batch: Any) -> torch.Tensor:
    """Compute SGLang's attention module over `hidden` [T, M]; return [T, M]."""
    q_THX, latent_TR, k_TP = _projected(module, hidden)
    up_k_HRN, up_v_HVR = _by_head(module)
    q_THN, q_THP = q_THX.split([module.qk_nope_head_dim, module.qk_rope_head_dim], dim=-1)
    q_THP, k_T1P = module.rotary_emb(positions, q_THP.contiguous(), k_TP[:, None].contiguous())
    rank, heads = module.kv_lora_rank, module.num_local_heads
    queries = hidden.new_empty(len(hidden), heads, rank + module.qk_rope_head_dim)
    weights.by_head(q_THN, up_k_HRN, out_THN=queries[..., :rank])
    queries[..., rank:] = q_THP
    keys = hidden.new_empty(len(hidden), 1, rank + module.qk_rope_head_dim)
    keys[:, 0, :rank] = module.kv_a_layernorm(latent_TR)
    keys[..., rank:] = k_T1P
    seen_THR = module.attn_mqa(queries, keys, keys[..., :rank], batch).view(-1, heads, rank)
    out_THV = hidden.new_empty(len(seen_THR), heads, module.v_head_dim)
    weights.by_head(seen_THR, up_v_HVR, out_THN=out_THV)
    out: torch.Tensor = module.o_proj(weights.all_heads(out_THV))[0]
    return out


def _projected(module: Any, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return queries [T, H, N + P], latents before their norm [T, R], and the keys' part to be rotated [T, P]."""
    rest = (module.kv_lora_rank, module.qk_rope_head_dim)
    if module.q_lora_rank is None:
        q, _ = module.q_proj(hidden)
        latent_TR, k_TP = module.kv_a_proj_with_mqa(hidden)[0].split(rest, dim=-1)
    else:
        both, _ = module.fused_qkv_a_proj_with_mqa(hidden)
        low, latent_TR, k_TP = both.split((module.q_lora_rank, *rest), dim=-1)
        q, _ = module.q_b_proj(module.q_a_layernorm(low))
    return q.view(-1, module.num_local_heads, module.qk_head_dim), latent_TR, k_TP


def _by_head(module: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the weights from a head's query to the latent [H, R, N], and from the latent to its value [H, V, R].

    They are views of the module's weights.
    """
    return module.w_kc.transpose(1, 2), module.w_vc.transpose(1, 2)
