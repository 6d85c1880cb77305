"""The adapter of Qwen2-MoE."""

from __future__ import annotations

from typing import cast

import torch

from sgl_batch.model_executor.families.base import ExpertBlock
from sgl_batch.model_executor.families.communicating import CommunicatingFamily
from sgl_batch.sglang_adapter.types.models import ExpertModules, GatedSharedMoe


class Qwen2MoeFamily(CommunicatingFamily):
    """Qwen2-MoE (Qwen1.5-MoE): a shared expert, weighted by a gate of its own."""

    architectures = ("Qwen2MoeForCausalLM",)

    def block_of(self, moe: ExpertModules) -> ExpertBlock:
        own = cast(GatedSharedMoe, moe)
        expert, gate = own.shared_expert, own.shared_expert_gate

        def shared(hidden: torch.Tensor) -> torch.Tensor:
            assert expert is not None, "a block without a shared expert has none to run"
            return torch.sigmoid(gate(hidden)) * expert(hidden)

        return ExpertBlock(gate=moe.gate, topk=moe.topk, experts=moe.experts, shared=None if expert is None else shared)
