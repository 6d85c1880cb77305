"""The adapter of DeepSeek-V2 and V3, and of models with their architecture (Kimi-K2)."""

from __future__ import annotations

from typing import cast

import torch

from sgl_batch.model_executor.families.base import ExpertBlock
from sgl_batch.model_executor.families.communicating import CommunicatingFamily, scaled_block
from sgl_batch.sglang_adapter.layers import clear_attention_inputs, scratch_allocator
from sgl_batch.sglang_adapter.types.batches import ForwardBatch
from sgl_batch.sglang_adapter.types.models import ExpertModules, LatentLayer


class DeepseekFamily(CommunicatingFamily):
    """DeepSeek-V2 and V3: latent attention, dense first layers, and shared experts.

    Attention gets its batch from the layer communicator; on a CPU it reads the batch itself.
    """

    architectures = ("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM")
    latent = True

    def attend(
        self, layer: torch.nn.Module, positions: torch.Tensor, hidden: torch.Tensor, batch: ForwardBatch
    ) -> torch.Tensor:
        own = cast(LatentLayer, layer)
        attended = own.self_attn(
            positions=positions,
            hidden_states=hidden,
            forward_batch=batch,
            zero_allocator=None if hidden.device.type == "cpu" else scratch_allocator(hidden.device),
        )
        clear_attention_inputs()
        return attended

    def block_of(self, moe: ExpertModules) -> ExpertBlock:
        return scaled_block(moe)
