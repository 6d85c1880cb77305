"""Owns what differs between model families: an adapter of tens of lines each, under its SGLang model classes."""

from __future__ import annotations

import torch

from sgl_batch.model_executor.families.base import ExpertBlock, Family
from sgl_batch.model_executor.families.deepseek import DeepseekFamily
from sgl_batch.model_executor.families.dense import LlamaFamily, Qwen3Family
from sgl_batch.model_executor.families.mixtral import MixtralFamily
from sgl_batch.model_executor.families.qwen3_moe import Qwen3MoeFamily

__all__ = [
    "FAMILIES",
    "DeepseekFamily",
    "ExpertBlock",
    "Family",
    "LlamaFamily",
    "MixtralFamily",
    "Qwen3Family",
    "Qwen3MoeFamily",
    "family_of",
]

FAMILIES: tuple[Family, ...] = (
    MixtralFamily(),
    Qwen3MoeFamily(),
    DeepseekFamily(),
    Qwen3Family(),
    LlamaFamily(),
)


def family_of(model: torch.nn.Module) -> Family | None:
    """The adapter for a loaded SGLang model, or None when its family is unknown."""
    name = type(model).__name__
    return next((family for family in FAMILIES if name in family.architectures), None)
