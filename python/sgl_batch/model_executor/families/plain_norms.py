"""Owns what families share whose layers hold their two norms themselves."""

from __future__ import annotations

from abc import ABC
from typing import cast

import torch

from sgl_batch.model_executor.families.base import Family, kept_rows
from sgl_batch.sglang_adapter.types.batches import ForwardBatch
from sgl_batch.sglang_adapter.types.models import PlainLayer


class PlainNormFamily(Family, ABC):
    """A family whose layers run a norm, attention and a second norm, with nothing between."""

    def attention_half(
        self,
        layer: torch.nn.Module,
        positions: torch.Tensor,
        hidden: torch.Tensor,
        residual: torch.Tensor | None,
        batch: ForwardBatch,
        rows: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        own = cast(PlainLayer, layer)
        if residual is None:
            residual, hidden = hidden, own.input_layernorm(hidden)
        else:
            hidden, residual = own.input_layernorm(hidden, residual)
        hidden = own.self_attn(positions=positions, hidden_states=hidden, forward_batch=batch)
        return own.post_attention_layernorm(*kept_rows(rows, hidden, residual))
