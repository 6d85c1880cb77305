"""The adapter of MiniMax-M2."""

from __future__ import annotations

from typing import cast

import torch

from sgl_batch.model_executor.families.base import ExpertBlock
from sgl_batch.model_executor.families.communicating import CommunicatingFamily
from sgl_batch.sglang_adapter.types.models import DenseBlock, ExpertModules, MinimaxLayer, SparseBlock


class MinimaxM2Family(CommunicatingFamily):
    """MiniMax-M2: its router needs rows in float32."""

    architectures = ("MiniMaxM2ForCausalLM",)

    def mlp_of(self, layer: torch.nn.Module) -> DenseBlock | SparseBlock:
        return cast(MinimaxLayer, layer).block_sparse_moe

    def block_of(self, moe: ExpertModules) -> ExpertBlock:
        return ExpertBlock(gate=moe.gate, topk=moe.topk, experts=moe.experts, gate_dtype=torch.float32)
