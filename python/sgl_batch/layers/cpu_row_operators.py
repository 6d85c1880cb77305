"""Owns norms, rotary embedding and penalties of logits by the native kernels; other options stay SGLang's own."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch

from sgl_batch.sglang_adapter.layers import (
    PLAIN_ROTARY,
    DeepseekScalingRotaryEmbedding,
    RMSNorm,
    is_plain_norm,
    register_forward,
    replace_qk_norm_rope,
    replace_repetition_penalties,
)


def register(kernels: ModuleType, dispatch_key: str) -> None:
    """Let SGLang's layer classes compute with the kernels, on the platform of the given key."""

    def rms_norm(
        norm: Any,
        x: torch.Tensor,
        residual: torch.Tensor | None = None,
        post_residual_addition: torch.Tensor | None = None,
    ) -> Any:
        same_type = norm.override_orig_dtype in (None, x.dtype) and (residual is None or residual.dtype == x.dtype)
        if post_residual_addition is not None or not same_type or not is_plain_norm(norm):
            return norm.forward_native(x, residual, post_residual_addition)
        rows, weight, eps = x.reshape(-1, x.shape[-1]), norm.weight.data, norm.variance_epsilon
        if residual is None:
            out, _ = kernels.rms_norm(rows if rows.stride(-1) == 1 else rows.contiguous(), None, weight, eps)
            return out.view(x.shape)
        # In place, as on a GPU: the rows that a sub-batch yields then lie where its group collects them.
        rows, before = rows.contiguous(), residual.reshape(rows.shape).contiguous()
        kernels.add_rms_norm_(rows, before, weight, eps)
        return rows.view(x.shape), before.view(x.shape)

    def rotary(
        embedding: Any,
        positions: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        offsets: torch.Tensor | None = None,
        fused_set_kv_buffer_arg: Any = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if offsets is not None or fused_set_kv_buffer_arg is not None or hasattr(embedding, "sin_cos_cache"):
            native: tuple[torch.Tensor, torch.Tensor] = embedding.forward_native(
                positions, query, key, offsets, fused_set_kv_buffer_arg
            )
            return native
        flat = positions.flatten().to(torch.int64)
        for heads in (query, key):
            kernels.rotary(
                heads.view(len(flat), -1),
                flat,
                embedding.cos_sin_cache,
                head_dim=embedding.head_size,
                neox=embedding.is_neox_style,
            )
        return query, key

    register_forward(RMSNorm, rms_norm, dispatch_key)
    for embedding_class in (*PLAIN_ROTARY, DeepseekScalingRotaryEmbedding):
        register_forward(embedding_class, rotary, dispatch_key)
    replace_repetition_penalties(kernels.penalize_repetition)


def adopt(kernels: ModuleType, model: Any) -> None:
    """Norm and rotate the heads of queries and keys in one pass, in a loaded model that norms them."""

    def qk_norm_rope(attention: Any, qkv: torch.Tensor, positions: torch.Tensor) -> None:
        kernels.qk_norm_rope(
            qkv,
            attention.q_norm.weight.data,
            attention.k_norm.weight.data,
            attention.q_norm.variance_epsilon,
            positions.flatten().to(torch.int64),
            attention.rotary_emb.cos_sin_cache,
            q_heads=attention.num_heads,
            k_heads=attention.num_kv_heads,
            neox=attention.rotary_emb.is_neox_style,
        )

    replace_qk_norm_rope(model, qk_norm_rope)
