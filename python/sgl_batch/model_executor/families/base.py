"""Owns the contract of a family adapter: the two halves of a decoder layer. The loop over layers is layer_runner's.

To add a family, subclass `Family` (or `PlainNormFamily` or `CommunicatingFamily`), and add it to `FAMILIES`.
"""

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
    """SGLang's modules of one layer with experts.

    Attributes:
        gate: The router.
        topk: Chooses experts from the router's logits.
        experts: The experts that this rank holds.
        shared: Computes the shared experts, which every row goes to: [rows, hidden] to [rows, hidden]. They are whole
            on every rank. None if the layer has none.
        scale: The factor by which the weights of the choice must still be multiplied.
        gate_dtype: The number type to which rows are converted for the router; None leaves them as they are.
    """

    gate: Router
    topk: ExpertChooser
    experts: ExpertLayer
    shared: Callable[[torch.Tensor], torch.Tensor] | None = None
    scale: float = 1.0
    gate_dtype: torch.dtype | None = None

    def route(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Choose experts for rows [rows, hidden]; return weights (float32) and global ids (int32), both [rows, top_k].

        Zero rows give empty tensors: SGLang's modules are not called.
        """
        if not len(hidden):
            shape = (0, self.experts.top_k)
            device = hidden.device
            return torch.empty(shape, device=device), torch.empty(shape, dtype=torch.int32, device=device)
        answer = self.gate(hidden if self.gate_dtype is None else hidden.to(self.gate_dtype))
        chosen = self.topk(hidden, answer[0] if isinstance(answer, tuple) else answer)
        return chosen.topk_weights.to(torch.float32) * self.scale, chosen.topk_ids.to(torch.int32)


def kept_rows(
    rows: torch.Tensor | None, attended: torch.Tensor, residual: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return these rows of what attention gave and of the residual, which is that of all rows; None keeps all.

    Attention may have computed just these.
    """
    if rows is None:
        return attended, residual
    return attended if len(attended) == len(rows) else attended[rows], residual[rows]


class Family(ABC):
    """Splits SGLang's decoder layers of one family into an attention half and an expert half.

    An adapter has no state, and computes with SGLang's own modules. Both halves may be called with any of a group's
    rows: an adapter may not mix rows or keep them. Behind the last layer's attention most rows of prompts are left out.

    Hidden states and residuals are [rows, hidden] in the model's number type. A method may write its results over its
    arguments; the caller uses the returned tensors only.
    """

    architectures: tuple[str, ...]
    """The names of SGLang's model classes that this adapter serves."""
    yield_options: tuple[str, ...] = YIELD_OPTIONS
    """Where sequences may yield inside a layer (core/units)."""
    latent: bool = False
    """Whether attention is latent: one row of KV for all heads."""
    sinks: bool = False
    """Whether attention has sinks."""
    clamped_experts: bool = False
    """Whether experts have biases and a clamped activation, and are stacked in a checkpoint."""
    dense: bool = False
    """Whether no layer has experts: then accumulation gains nothing for prompts."""

    def embed(self, model: torch.nn.Module, input_ids: torch.Tensor) -> torch.Tensor:
        """Return the embeddings [rows, hidden] of token ids [rows]."""
        own = cast(CausalModel, model)
        return own.model.embed_tokens(input_ids)

    def layers(self, model: torch.nn.Module) -> Sequence[torch.nn.Module]:
        """Return the decoder layers that this process holds, in order."""
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
        rows: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the norm, attention, and the norm before the experts.

        Args:
            layer: One of `layers`.
            positions: The rows' positions in their sequences [rows], int64.
            hidden: The output of the layer before, or the embeddings.
            residual: The residual of the layer before; None in the first layer.
            batch: The sub-batch. Attention reads and writes KV as it says; the backend has its metadata.
            rows: The numbers of the rows that are computed behind attention, in order; None for all. Use `kept_rows`.

        Returns:
            The rows for the experts, and the residual.
        """

    @abstractmethod
    def expert_half(self, layer: torch.nn.Module, hidden: torch.Tensor, batch: ForwardBatch | None) -> torch.Tensor:
        """Run the router and the experts over combined rows; return what they add to each row.

        Only for a rank that holds all experts; several ranks use `expert_block`. In a dense layer it runs the MLP.
        `batch` is the group's forward batch; None in a rank without rows.
        """

    @abstractmethod
    def expert_block(self, layer: torch.nn.Module) -> ExpertBlock | None:
        """Return the modules that route and compute a layer's rows, for the exchange between ranks.

        None for a layer without experts.
        """

    def finish_layer(
        self, layer: torch.nn.Module, hidden: torch.Tensor, residual: torch.Tensor, batch: ForwardBatch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run what follows the experts in a layer; most families leave the residual to the next norm.

        Returns the hidden states and the residual for the next layer's `attention_half`.
        """
        return hidden, residual

    def final_norm(self, model: torch.nn.Module, hidden: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """Add the residual after the last layer and apply the model's last norm."""
        own = cast(CausalModel, model)
        return own.model.norm(hidden, residual)[0]
