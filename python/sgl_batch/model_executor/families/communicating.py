"""Owns what families share whose norms are held by SGLang's layer communicator."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, cast

import torch

from sgl_batch.model_executor.families.base import ExpertBlock, Family, kept_rows
from sgl_batch.sglang_adapter.types.batches import ForwardBatch
from sgl_batch.sglang_adapter.types.models import (
    AttendingLayer,
    CommunicatingLayer,
    DenseBlock,
    ExpertModules,
    ScaledMoe,
    SparseBlock,
)


class CommunicatingFamily(Family):
    """A family whose norms are held by SGLang's layer communicator, with what tensor parallelism adds around them."""

    def attend(
        self, layer: torch.nn.Module, positions: torch.Tensor, hidden: torch.Tensor, batch: ForwardBatch
    ) -> torch.Tensor:
        """Run a layer's attention, without its norms."""
        own = cast(AttendingLayer, layer)
        return own.self_attn(positions=positions, hidden_states=hidden, forward_batch=batch)

    def mlp_of(self, layer: torch.nn.Module) -> DenseBlock | SparseBlock:
        """Return the module that follows a layer's attention."""
        return cast(CommunicatingLayer, layer).mlp

    @abstractmethod
    def block_of(self, moe: ExpertModules) -> ExpertBlock:
        """Return SGLang's modules of a layer with experts."""

    def attention_half(
        self,
        layer: torch.nn.Module,
        positions: torch.Tensor,
        hidden: torch.Tensor,
        residual: torch.Tensor | None,
        batch: ForwardBatch,
        rows: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        own = cast(CommunicatingLayer, layer)
        hidden, residual = own.layer_communicator.prepare_attn(hidden, residual, batch)
        hidden = self.attend(layer, positions, hidden, batch)
        return own.layer_communicator.prepare_mlp(*kept_rows(rows, hidden, residual), batch)

    def expert_half(self, layer: torch.nn.Module, hidden: torch.Tensor, batch: ForwardBatch | None) -> torch.Tensor:
        return self.mlp_of(layer)(hidden, batch)

    def expert_block(self, layer: torch.nn.Module) -> ExpertBlock | None:
        moe: Any = self.mlp_of(layer)
        return self.block_of(moe) if hasattr(moe, "experts") else None

    def finish_layer(
        self, layer: torch.nn.Module, hidden: torch.Tensor, residual: torch.Tensor, batch: ForwardBatch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        own = cast(CommunicatingLayer, layer)
        return own.layer_communicator.postprocess_layer(hidden, residual, batch)


def scaled_block(moe: ExpertModules) -> ExpertBlock:
    """Return a block whose routed experts are scaled, unlike its shared ones.

    On a GPU, SGLang's top-k or its expert runner scales them.
    """
    own = cast(ScaledMoe, moe)
    return ExpertBlock(
        gate=moe.gate,
        topk=moe.topk,
        experts=moe.experts,
        shared=getattr(moe, "shared_experts", None),
        scale=own.routed_scaling_factor if moe.gate.weight.device.type == "cpu" else 1.0,
    )
