"""The adapter of Mixtral."""

from __future__ import annotations

from typing import cast

import torch

from sgl_batch.model_executor.families.base import ExpertBlock, Family
from sgl_batch.sglang_adapter.types.batches import ForwardBatch
from sgl_batch.sglang_adapter.types.models import MixtralLayer


class MixtralFamily(Family):
    """Mixtral: plain norms around attention, and a block of experts."""

    architectures = ("MixtralForCausalLM",)

    def attention_half(
        self,
        layer: torch.nn.Module,
        positions: torch.Tensor,
        hidden: torch.Tensor,
        residual: torch.Tensor | None,
        batch: ForwardBatch,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        own = cast(MixtralLayer, layer)
        if residual is None:
            residual, hidden = hidden, own.input_layernorm(hidden)
        else:
            hidden, residual = own.input_layernorm(hidden, residual)
        hidden = own.self_attn(positions=positions, hidden_states=hidden, forward_batch=batch)
        return own.post_attention_layernorm(hidden, residual)

    def expert_half(self, layer: torch.nn.Module, hidden: torch.Tensor, batch: ForwardBatch | None) -> torch.Tensor:
        own = cast(MixtralLayer, layer)
        return own.block_sparse_moe(hidden)

    def expert_block(self, layer: torch.nn.Module) -> ExpertBlock | None:
        own = cast(MixtralLayer, layer)
        block = own.block_sparse_moe
        return ExpertBlock(gate=block.gate, topk=block.topk, experts=block.experts)
