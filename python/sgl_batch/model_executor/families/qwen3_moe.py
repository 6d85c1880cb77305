"""The adapter of Qwen3-MoE."""

from __future__ import annotations

from sgl_batch.model_executor.families.base import ExpertBlock
from sgl_batch.model_executor.families.communicating import CommunicatingFamily
from sgl_batch.sglang_adapter.types.models import ExpertModules


class Qwen3MoeFamily(CommunicatingFamily):
    """Qwen3-MoE: some of its layers may be dense."""

    architectures = ("Qwen3MoeForCausalLM",)

    def block_of(self, moe: ExpertModules) -> ExpertBlock:
        return ExpertBlock(gate=moe.gate, topk=moe.topk, experts=moe.experts)
