"""Owns the observation of a model's routers while it runs: logits, choices, load balance."""

from functools import partial

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel


class RouterProbe:
    """Keeps the router logits of every expert layer of the latest forward pass."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._top_k: int = model.config.num_experts_per_tok
        self._blocks = [
            module for name, module in model.named_modules() if name.endswith(".mlp") and hasattr(module, "experts")
        ]
        dense = getattr(model.config, "first_k_dense_replace", 0)
        assert len(self._blocks) == model.config.num_hidden_layers - dense, "transformers renamed its expert layers"
        self.logits_LTE: list[Tensor] = [torch.empty(0)] * len(self._blocks)
        for layer, block in enumerate(self._blocks):
            block.gate.register_forward_hook(partial(self._store, layer))

    def _store(self, layer: int, _module: nn.Module, _inputs: object, outputs: Tensor | tuple[Tensor, ...]) -> None:
        self.logits_LTE[layer] = outputs if isinstance(outputs, Tensor) else outputs[0]

    def expert_shares(self, layer: int) -> Tensor:
        """Return each expert's share [E] of the (token, choice) pairs of one layer; they sum to 1."""
        block, logits_TE = self._blocks[layer], self.logits_LTE[layer]
        if _is_biased(block):
            chosen = block.route_tokens_to_experts(logits_TE)[0].flatten()
        else:
            chosen = logits_TE.topk(self._top_k, dim=-1).indices.flatten()
        return torch.bincount(chosen, minlength=logits_TE.shape[1]).float() / chosen.numel()

    def balance_loss(self) -> Tensor:
        """Return the load balance per layer (Switch Transformers, section 2.2), mean over layers; 1.0 is balanced."""
        losses = []
        for layer, block in enumerate(self._blocks):
            logits_TE = self.logits_LTE[layer].float()
            if _is_biased(block):
                scores_TE = logits_TE.sigmoid()
                probs_TE = scores_TE / scores_TE.sum(dim=-1, keepdim=True)
            else:
                probs_TE = logits_TE.softmax(dim=-1)
            shares_E = self.expert_shares(layer)
            losses.append(len(shares_E) * (shares_E * probs_TE.mean(dim=0)).sum())
        return torch.stack(losses).mean()

    @torch.no_grad()
    def step_biases(self, step_size: float) -> None:
        """Raise the bias of experts with less than their share and lower the others' (DeepSeek-V3, section 2.1.2)."""
        for layer, block in enumerate(self._blocks):
            if _is_biased(block):
                shares_E = self.expert_shares(layer)
                block.gate.e_score_correction_bias += step_size * (1 / len(shares_E) - shares_E).sign()


def _is_biased(block: nn.Module) -> bool:
    """Return whether a block scores by sigmoid and chooses by score plus bias, as DeepSeek-V3 does."""
    return hasattr(block.gate, "e_score_correction_bias")
