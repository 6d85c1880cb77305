"""The adapter of gpt-oss."""

from __future__ import annotations

from typing import cast

from sgl_batch.model_executor.families.base import ExpertBlock
from sgl_batch.model_executor.families.communicating import CommunicatingFamily
from sgl_batch.sglang_adapter.types.models import ExpertModules, GptOssMoe


class GptOssFamily(CommunicatingFamily):
    """gpt-oss: attention with sinks, in every other layer over a window; experts and router with biases."""

    architectures = ("GptOssForCausalLM",)
    sinks = True
    clamped_experts = True

    def block_of(self, moe: ExpertModules) -> ExpertBlock:
        own = cast(GptOssMoe, moe)
        return ExpertBlock(gate=own.router, topk=moe.topk, experts=moe.experts)
