"""The adapters of families without experts. The expert half of a layer is its MLP."""

from __future__ import annotations

from typing import cast

import torch

from sgl_batch.model_executor.families.base import ExpertBlock
from sgl_batch.model_executor.families.communicating import CommunicatingFamily
from sgl_batch.model_executor.families.plain_norms import PlainNormFamily
from sgl_batch.sglang_adapter.types.batches import ForwardBatch
from sgl_batch.sglang_adapter.types.models import DenseLayer, ExpertModules


class Qwen3Family(CommunicatingFamily):
    """Qwen3: the heads of queries and keys are normed."""

    architectures = ("Qwen3ForCausalLM",)
    dense = True

    def block_of(self, moe: ExpertModules) -> ExpertBlock:
        raise AssertionError("a dense layer has no experts")


class LlamaFamily(PlainNormFamily):
    """Llama, and the families that SGLang builds in the same way: Qwen2 (with biases) and Mistral."""

    architectures = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM")
    dense = True

    def expert_half(self, layer: torch.nn.Module, hidden: torch.Tensor, batch: ForwardBatch | None) -> torch.Tensor:
        own = cast(DenseLayer, layer)
        return own.mlp(hidden)

    def expert_block(self, layer: torch.nn.Module) -> ExpertBlock | None:
        return None
