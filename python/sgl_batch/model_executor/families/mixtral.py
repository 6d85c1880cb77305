"""The adapter of Mixtral."""

from __future__ import annotations

from typing import cast

import torch

from sgl_batch.model_executor.families.base import ExpertBlock
from sgl_batch.model_executor.families.plain_norms import PlainNormFamily
from sgl_batch.sglang_adapter.types.batches import ForwardBatch
from sgl_batch.sglang_adapter.types.models import MixtralLayer


class MixtralFamily(PlainNormFamily):
    """Mixtral: plain norms around attention, and a block of experts."""

    architectures = ("MixtralForCausalLM",)

    def expert_half(self, layer: torch.nn.Module, hidden: torch.Tensor, batch: ForwardBatch | None) -> torch.Tensor:
        own = cast(MixtralLayer, layer)
        return own.block_sparse_moe(hidden)

    def expert_block(self, layer: torch.nn.Module) -> ExpertBlock | None:
        own = cast(MixtralLayer, layer)
        block = own.block_sparse_moe
        return ExpertBlock(gate=block.gate, topk=block.topk, experts=block.experts)
