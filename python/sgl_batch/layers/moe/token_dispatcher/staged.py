"""Owns the exchange of tokens in GPU memory by a dispatcher for host memory: rows are copied to the host and back.

It is for ranks that share a GPU, which NCCL does not support. Not yet run on a GPU.
"""

from __future__ import annotations

import torch

from sgl_batch.layers.moe.token_dispatcher.base import Received, TokenDispatcher


class StagedDispatcher(TokenDispatcher):
    """Another dispatcher's exchange, for tensors on `device`."""

    def __init__(self, through: TokenDispatcher, device: torch.device) -> None:
        super().__init__(
            shard=through.shard,
            num_shards=through.num_shards,
            num_experts=through.num_experts,
            hidden_size=through.hidden_size,
        )
        self._through, self._device = through, device

    def take_waited_s(self) -> float:
        return self._through.take_waited_s()

    def _check_ids(self, ids_TK: torch.Tensor) -> None:
        """The other dispatcher checks ids."""

    def _send_tokens(self, x_TM: torch.Tensor, topk_ids_TK: torch.Tensor, topk_weights_TK: torch.Tensor) -> Received:
        received = self._through.dispatch(x_TM.cpu(), topk_ids_TK.cpu(), topk_weights_TK.cpu())
        return Received(
            x_RM=received.x_RM.to(self._device),
            ids_RK=received.ids_RK.to(self._device),
            weights_RK=received.weights_RK.to(self._device),
            routes=received,
        )

    def _return_partials(self, partial_RM: torch.Tensor, received: Received) -> torch.Tensor:
        assert isinstance(received.routes, Received), "the base class lets only this dispatcher's own Received through"
        return self._through.combine(partial_RM.cpu(), received.routes).to(self._device)
