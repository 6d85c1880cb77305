"""Owns what differs between model families: the two halves of a layer. The loop over layers is layer_runner's.

A family is an adapter of tens of lines, registered under its SGLang model classes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch

from sgl_batch.core.units import YIELD_OPTIONS
from sgl_batch.sglang_adapter.layers import forget_attention_inputs, number_scratch
from sgl_batch.sglang_adapter.types.batches import ForwardBatch
from sgl_batch.sglang_adapter.types.models import (
    AttendingLayer,
    CausalModel,
    CommunicatingLayer,
    DeepseekMoe,
    ExpertChooser,
    ExpertLayer,
    ExpertModules,
    LatentLayer,
    MixtralLayer,
    Router,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertBlock:
    """SGLang's modules of one layer: router weights, choice of experts, the experts, and experts of every row.

    `scale`: what the weights of the choice are still to be multiplied by. Shared experts are whole on every rank.
    """

    gate: Router
    topk: ExpertChooser
    experts: ExpertLayer
    shared: Callable[[torch.Tensor], torch.Tensor] | None = None
    scale: float = 1.0

    def route(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Weights, float32, and global ids, int32, of each row's experts: [rows, top_k] both."""
        if not len(hidden):
            shape = (0, self.experts.top_k)
            device = hidden.device
            return torch.empty(shape, device=device), torch.empty(shape, dtype=torch.int32, device=device)
        answer = self.gate(hidden)
        chosen = self.topk(hidden, answer[0] if isinstance(answer, tuple) else answer)
        return chosen.topk_weights.to(torch.float32) * self.scale, chosen.topk_ids.to(torch.int32)


class Family(ABC):
    """The halves of a decoder layer. Hidden states and residuals are [rows, hidden]."""

    architectures: tuple[str, ...]
    yield_options: tuple[str, ...] = YIELD_OPTIONS
    """Where sequences may yield inside a layer (core/units)."""
    latent: bool = False
    """Whether attention is latent: one row of KV for all heads."""

    def embed(self, model: torch.nn.Module, input_ids: torch.Tensor) -> torch.Tensor:
        own = cast(CausalModel, model)
        return own.model.embed_tokens(input_ids)

    def layers(self, model: torch.nn.Module) -> Sequence[torch.nn.Module]:
        """The layers that this process holds, in order."""
        own = cast(CausalModel, model)
        body = own.model
        return [body.layers[i] for i in range(body.start_layer, body.end_layer)]

    @abstractmethod
    def attention_half(
        self,
        layer: torch.nn.Module,
        positions: torch.Tensor,
        hidden: torch.Tensor,
        residual: torch.Tensor | None,
        batch: ForwardBatch,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Norm, attention, and the norm before the experts; returns (hidden, residual)."""

    @abstractmethod
    def expert_half(self, layer: torch.nn.Module, hidden: torch.Tensor, batch: ForwardBatch | None) -> torch.Tensor:
        """Router and experts over the combined rows."""

    @abstractmethod
    def expert_block(self, layer: torch.nn.Module) -> ExpertBlock | None:
        """What routes a layer's rows and computes them, for the exchange between ranks; None for a dense layer."""

    def finish_layer(
        self, layer: torch.nn.Module, hidden: torch.Tensor, residual: torch.Tensor, batch: ForwardBatch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What follows the experts in a layer; most families leave the residual to the next norm."""
        return hidden, residual

    def final_norm(self, model: torch.nn.Module, hidden: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        own = cast(CausalModel, model)
        return own.model.norm(hidden, residual)[0]


class MixtralFamily(Family):
    """Mixtral: plain norms around attention, and a block of experts."""

    architectures = ("MixtralForCausalLM",)

    def attention_half(
        self,
        layer: torch.nn.Module,
        positions: torch.Tensor,
        hidden: torch.Tensor,
        residual: torch.Tensor | None,
        batch: ForwardBatch,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        own = cast(MixtralLayer, layer)
        if residual is None:
            residual, hidden = hidden, own.input_layernorm(hidden)
        else:
            hidden, residual = own.input_layernorm(hidden, residual)
        hidden = own.self_attn(positions=positions, hidden_states=hidden, forward_batch=batch)
        return own.post_attention_layernorm(hidden, residual)

    def expert_half(self, layer: torch.nn.Module, hidden: torch.Tensor, batch: ForwardBatch | None) -> torch.Tensor:
        own = cast(MixtralLayer, layer)
        return own.block_sparse_moe(hidden)

    def expert_block(self, layer: torch.nn.Module) -> ExpertBlock | None:
        own = cast(MixtralLayer, layer)
        block = own.block_sparse_moe
        return ExpertBlock(gate=block.gate, topk=block.topk, experts=block.experts)


class CommunicatingFamily(Family):
    """Families of which SGLang's layer communicator holds the norms, and what tensor parallelism adds around them."""

    @abstractmethod
    def attend(
        self, layer: torch.nn.Module, positions: torch.Tensor, hidden: torch.Tensor, batch: ForwardBatch
    ) -> torch.Tensor:
        """A layer's attention, between its norms."""

    @abstractmethod
    def block_of(self, moe: ExpertModules) -> ExpertBlock:
        """SGLang's modules of a layer that has experts."""

    def attention_half(
        self,
        layer: torch.nn.Module,
        positions: torch.Tensor,
        hidden: torch.Tensor,
        residual: torch.Tensor | None,
        batch: ForwardBatch,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        own = cast(CommunicatingLayer, layer)
        hidden, residual = own.layer_communicator.prepare_attn(hidden, residual, batch)
        hidden = self.attend(layer, positions, hidden, batch)
        return own.layer_communicator.prepare_mlp(hidden, residual, batch)

    def expert_half(self, layer: torch.nn.Module, hidden: torch.Tensor, batch: ForwardBatch | None) -> torch.Tensor:
        own = cast(CommunicatingLayer, layer)
        return own.mlp(hidden, batch)

    def expert_block(self, layer: torch.nn.Module) -> ExpertBlock | None:
        own = cast(CommunicatingLayer, layer)
        moe: Any = own.mlp
        return self.block_of(moe) if hasattr(moe, "experts") else None

    def finish_layer(
        self, layer: torch.nn.Module, hidden: torch.Tensor, residual: torch.Tensor, batch: ForwardBatch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        own = cast(CommunicatingLayer, layer)
        return own.layer_communicator.postprocess_layer(hidden, residual, batch)


class Qwen3MoeFamily(CommunicatingFamily):
    """Qwen3-MoE."""

    architectures = ("Qwen3MoeForCausalLM",)

    def attend(
        self, layer: torch.nn.Module, positions: torch.Tensor, hidden: torch.Tensor, batch: ForwardBatch
    ) -> torch.Tensor:
        own = cast(AttendingLayer, layer)
        return own.self_attn(positions=positions, hidden_states=hidden, forward_batch=batch)

    def block_of(self, moe: ExpertModules) -> ExpertBlock:
        return ExpertBlock(gate=moe.gate, topk=moe.topk, experts=moe.experts)


class DeepseekFamily(CommunicatingFamily):
    """DeepSeek-V2 and V3: latent attention, dense first layers, and experts that every row goes to beside the chosen.

    Attention reads a batch through the layer communicator, or itself on a CPU.
    """

    architectures = ("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM")
    latent = True

    def attend(
        self, layer: torch.nn.Module, positions: torch.Tensor, hidden: torch.Tensor, batch: ForwardBatch
    ) -> torch.Tensor:
        own = cast(LatentLayer, layer)
        attended = own.self_attn(
            positions=positions,
            hidden_states=hidden,
            forward_batch=batch,
            zero_allocator=number_scratch(hidden.device),
        )
        forget_attention_inputs()
        return attended

    def block_of(self, moe: ExpertModules) -> ExpertBlock:
        """SGLang's block of routed and shared experts. On a GPU its top-k or its runner scales the weights."""
        own = cast(DeepseekMoe, moe)
        on_cpu = moe.gate.weight.device.type == "cpu"
        return ExpertBlock(
            gate=moe.gate,
            topk=moe.topk,
            experts=moe.experts,
            shared=getattr(moe, "shared_experts", None),
            scale=own.routed_scaling_factor if on_cpu else 1.0,
        )


FAMILIES: tuple[Family, ...] = (MixtralFamily(), Qwen3MoeFamily(), DeepseekFamily())


def family_of(model: torch.nn.Module) -> Family | None:
    """The adapter for a loaded SGLang model, or None when its family is unknown."""
    name = type(model).__name__
    return next((family for family in FAMILIES if name in family.architectures), None)
