"""The adapter of GLM-4.5."""

from __future__ import annotations

from sgl_batch.model_executor.families.base import ExpertBlock
from sgl_batch.model_executor.families.communicating import CommunicatingFamily, scaled_block
from sgl_batch.sglang_adapter.types.models import ExpertModules


class Glm4MoeFamily(CommunicatingFamily):
    """GLM-4.5 to 4.7: dense first layers, and shared experts."""

    architectures = ("Glm4MoeForCausalLM",)

    def block_of(self, moe: ExpertModules) -> ExpertBlock:
        return scaled_block(moe)
