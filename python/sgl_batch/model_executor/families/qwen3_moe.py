"""The adapter of Qwen3-MoE."""

from __future__ import annotations

from typing import cast

import torch

from sgl_batch.model_executor.families.base import ExpertBlock
from sgl_batch.model_executor.families.communicating import CommunicatingFamily
from sgl_batch.sglang_adapter.types.batches import ForwardBatch
from sgl_batch.sglang_adapter.types.models import AttendingLayer, ExpertModules


class Qwen3MoeFamily(CommunicatingFamily):
    """Qwen3-MoE."""

    architectures = ("Qwen3MoeForCausalLM",)

    def attend(
        self, layer: torch.nn.Module, positions: torch.Tensor, hidden: torch.Tensor, batch: ForwardBatch
    ) -> torch.Tensor:
        own = cast(AttendingLayer, layer)
        return own.self_attn(positions=positions, hidden_states=hidden, forward_batch=batch)

    def block_of(self, moe: ExpertModules) -> ExpertBlock:
        return ExpertBlock(gate=moe.gate, topk=moe.topk, experts=moe.experts)
