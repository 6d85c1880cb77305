"""Owns what an adapter of a model family is: the two halves of a layer. The loop over layers is layer_runner's."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import torch

from sgl_batch.core.units import YIELD_OPTIONS
from sgl_batch.sglang_adapter.types.batches import ForwardBatch
from sgl_batch.sglang_adapter.types.models import CausalModel, ExpertChooser, ExpertLayer, Router


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertBlock:
    """SGLang's modules of one layer: router weights, choice of experts, the experts, and experts of every row.

    `scale`: what the weights of the choice are still to be multiplied by. `gate_dtype`: the number type of the rows
    that the router takes, where it is not theirs. Shared experts are whole on every rank.
    """

    gate: Router
    topk: ExpertChooser
    experts: ExpertLayer
    shared: Callable[[torch.Tensor], torch.Tensor] | None = None
    scale: float = 1.0
    gate_dtype: torch.dtype | None = None

    def route(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Weights, float32, and global ids, int32, of each row's experts: [rows, top_k] both."""
        if not len(hidden):
            shape = (0, self.experts.top_k)
            device = hidden.device
            return torch.empty(shape, device=device), torch.empty(shape, dtype=torch.int32, device=device)
        answer = self.gate(hidden if self.gate_dtype is None else hidden.to(self.gate_dtype))
        chosen = self.topk(hidden, answer[0] if isinstance(answer, tuple) else answer)
        return chosen.topk_weights.to(torch.float32) * self.scale, chosen.topk_ids.to(torch.int32)


class Family(ABC):
    """The halves of a decoder layer. Hidden states and residuals are [rows, hidden]."""

    architectures: tuple[str, ...]
    yield_options: tuple[str, ...] = YIELD_OPTIONS
    """Where sequences may yield inside a layer (core/units)."""
    latent: bool = False
    """Whether attention is latent: one row of KV for all heads."""
    sinks: bool = False
    """Whether attention has sinks."""
    clamped_experts: bool = False
    """Whether experts have biases and a clamped activation, and those of a layer are one tensor in a checkpoint."""
    dense: bool = False
    """Whether no layer has experts: then accumulation gains nothing for prompts."""

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
