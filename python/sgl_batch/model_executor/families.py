"""Owns what differs between model families: the two halves of a layer. The loop over layers is layer_runner's.

A family is an adapter of tens of lines, registered under its SGLang model classes. Families whose attention
keeps a latent cache (MLA) need nothing else here: their attention half calls their own module.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any

import torch


class Family(ABC):
    """The halves of a decoder layer. Hidden states and residuals are [rows, hidden]."""

    architectures: tuple[str, ...]

    def embed(self, model: Any, input_ids: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = model.model.embed_tokens(input_ids)
        return hidden

    def layers(self, model: Any) -> Iterable[Any]:
        """The layers that this process holds, in order."""
        body = model.model
        return [body.layers[i] for i in range(body.start_layer, body.end_layer)]

    @abstractmethod
    def attention_half(
        self, layer: Any, positions: torch.Tensor, hidden: torch.Tensor, residual: torch.Tensor | None, batch: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Norm, attention, and the norm before the experts; returns (hidden, residual)."""

    @abstractmethod
    def expert_half(self, layer: Any, hidden: torch.Tensor, batch: Any) -> torch.Tensor:
        """Router and experts over the combined rows."""

    def finish_layer(
        self, layer: Any, hidden: torch.Tensor, residual: torch.Tensor, batch: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What follows the experts in a layer; most families leave the residual to the next norm."""
        return hidden, residual

    def final_norm(self, model: Any, hidden: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        normed: torch.Tensor = model.model.norm(hidden, residual)[0]
        return normed


class MixtralFamily(Family):
    """Mixtral: plain norms around attention, and a block of experts."""

    architectures = ("MixtralForCausalLM",)

    def attention_half(
        self, layer: Any, positions: torch.Tensor, hidden: torch.Tensor, residual: torch.Tensor | None, batch: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if residual is None:
            residual, hidden = hidden, layer.input_layernorm(hidden)
        else:
            hidden, residual = layer.input_layernorm(hidden, residual)
        hidden = layer.self_attn(positions=positions, hidden_states=hidden, forward_batch=batch)
        normed: tuple[torch.Tensor, torch.Tensor] = layer.post_attention_layernorm(hidden, residual)
        return normed

    def expert_half(self, layer: Any, hidden: torch.Tensor, batch: Any) -> torch.Tensor:
        out: torch.Tensor = layer.block_sparse_moe(hidden)
        return out


class Qwen3MoeFamily(Family):
    """Qwen3-MoE: SGLang's layer communicator holds the norms and what tensor parallelism adds around them."""

    architectures = ("Qwen3MoeForCausalLM",)

    def attention_half(
        self, layer: Any, positions: torch.Tensor, hidden: torch.Tensor, residual: torch.Tensor | None, batch: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        hidden, residual = layer.layer_communicator.prepare_attn(hidden, residual, batch)
        hidden = layer.self_attn(positions=positions, hidden_states=hidden, forward_batch=batch)
        normed: tuple[torch.Tensor, torch.Tensor] = layer.layer_communicator.prepare_mlp(hidden, residual, batch)
        return normed

    def expert_half(self, layer: Any, hidden: torch.Tensor, batch: Any) -> torch.Tensor:
        out: torch.Tensor = layer.mlp(hidden, batch)
        return out

    def finish_layer(
        self, layer: Any, hidden: torch.Tensor, residual: torch.Tensor, batch: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        done: tuple[torch.Tensor, torch.Tensor] = layer.layer_communicator.postprocess_layer(hidden, residual, batch)
        return done


FAMILIES: tuple[Family, ...] = (MixtralFamily(), Qwen3MoeFamily())


def family_of(model: Any) -> Family | None:
    """The adapter for a loaded SGLang model, or None when its family is unknown."""
    name = type(model).__name__
    return next((family for family in FAMILIES if name in family.architectures), None)
