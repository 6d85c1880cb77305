"""Owns what differs between model families: one adapter each, of tens of lines, for SGLang's model classes."""

from __future__ import annotations

import torch

from sgl_batch.model_executor.families.base import ExpertBlock, Family
from sgl_batch.model_executor.families.communicating import CommunicatingFamily
from sgl_batch.model_executor.families.deepseek import DeepseekFamily
from sgl_batch.model_executor.families.dense import LlamaFamily, Qwen3Family
from sgl_batch.model_executor.families.glm4_moe import Glm4MoeFamily
from sgl_batch.model_executor.families.gpt_oss import GptOssFamily
from sgl_batch.model_executor.families.minimax_m2 import MinimaxM2Family
from sgl_batch.model_executor.families.mixtral import MixtralFamily
from sgl_batch.model_executor.families.olmoe import OlmoeFamily
from sgl_batch.model_executor.families.qwen2_moe import Qwen2MoeFamily
from sgl_batch.model_executor.families.qwen3_moe import Qwen3MoeFamily

__all__ = [
    "FAMILIES",
    "CommunicatingFamily",
    "DeepseekFamily",
    "ExpertBlock",
    "Family",
    "Glm4MoeFamily",
    "GptOssFamily",
    "LlamaFamily",
    "MinimaxM2Family",
    "MixtralFamily",
    "OlmoeFamily",
    "Qwen2MoeFamily",
    "Qwen3Family",
    "Qwen3MoeFamily",
    "family_of",
]

FAMILIES: tuple[Family, ...] = (
    MixtralFamily(),
    OlmoeFamily(),
    Qwen2MoeFamily(),
    Qwen3MoeFamily(),
    Glm4MoeFamily(),
    DeepseekFamily(),
    GptOssFamily(),
    MinimaxM2Family(),
    Qwen3Family(),
    LlamaFamily(),
)


def family_of(model: torch.nn.Module) -> Family | None:
    """Return the adapter for a loaded SGLang model, or None if its family has none."""
    name = type(model).__name__
    return next((family for family in FAMILIES if name in family.architectures), None)
