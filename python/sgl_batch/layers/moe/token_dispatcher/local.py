"""Owns the dispatcher of a single rank, which exchanges nothing."""

from __future__ import annotations

import torch

from sgl_batch.layers.moe.token_dispatcher.base import Received, TokenDispatcher


class LocalDispatcher(TokenDispatcher):
    """Returns all tokens to the only rank without a copy, also tokens whose choices are all -1."""

    def __init__(self, *, num_experts: int, hidden_size: int) -> None:
        super().__init__(shard=0, num_shards=1, num_experts=num_experts, hidden_size=hidden_size)

    def _send_tokens(self, x_TM: torch.Tensor, topk_ids_TK: torch.Tensor, topk_weights_TK: torch.Tensor) -> Received:
        return Received(x_RM=x_TM, ids_RK=topk_ids_TK.to(torch.int32), weights_RK=topk_weights_TK, routes=None)

    def _return_partials(self, partial_RM: torch.Tensor, received: Received) -> torch.Tensor:
        return partial_RM
