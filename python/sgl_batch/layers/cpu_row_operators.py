"""Owns RMS norm and rotary embedding under SGLang's layers by the native kernels; other options stay SGLang's own."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch

from sgl_batch.sglang_adapter.layers import (
    DeepseekScalingRotaryEmbedding,
    RMSNorm,
    RotaryEmbedding,
    register_forward,
)


def register(kernels: ModuleType, dispatch_key: str) -> None:
    """Put the kernels under SGLang's layer classes on the platform of the given key."""

    def rms_norm(
        norm: Any,
        x: torch.Tensor,
        residual: torch.Tensor | None = None,
        post_residual_addition: torch.Tensor | None = None,
    ) -> Any:
        plain = (
            post_residual_addition is None
            and norm.variance_size_override is None
            and norm.override_orig_dtype in (None, x.dtype)
            and not norm.cast_x_before_out_mul
            and not norm.fp32_residual
            and (residual is None or residual.dtype == x.dtype)
        )
        if not plain:
            return norm.forward_native(x, residual, post_residual_addition)
        rows = x.reshape(-1, x.shape[-1])
        if rows.stride(-1) != 1:
            rows = rows.contiguous()
        before = None if residual is None else residual.reshape(rows.shape).contiguous()
        out, after = kernels.rms_norm(rows, before, norm.weight.data, norm.variance_epsilon)
        return out.view(x.shape) if after is None else (out.view(x.shape), after.view(x.shape))

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
    for embedding_class in (RotaryEmbedding, DeepseekScalingRotaryEmbedding):
        register_forward(embedding_class, rotary, dispatch_key)
