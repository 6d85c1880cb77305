"""The adapter of OLMoE."""

from __future__ import annotations

from typing import cast

import torch

from sgl_batch.model_executor.families.base import ExpertBlock
from sgl_batch.model_executor.families.plain_norms import PlainNormFamily
from sgl_batch.sglang_adapter.types.batches import ForwardBatch
from sgl_batch.sglang_adapter.types.models import OlmoeLayer


class OlmoeFamily(PlainNormFamily):
    """OLMoE: plain norms around attention, and a block of experts."""

    architectures = ("OlmoeForCausalLM",)

    def expert_half(self, layer: torch.nn.Module, hidden: torch.Tensor, batch: ForwardBatch | None) -> torch.Tensor:
        return cast(OlmoeLayer, layer).mlp(hidden)

    def expert_block(self, layer: torch.nn.Module) -> ExpertBlock | None:
        block = cast(OlmoeLayer, layer).mlp
        return ExpertBlock(gate=block.gate, topk=block.topk, experts=block.experts)
