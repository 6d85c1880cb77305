"""Owns the exchange through DeepEP's normal mode, and is the only importer of deep_ep. Not yet run on a GPU.

It follows the published interface of DeepEP's `Buffer`; the conformance suite has not yet passed on a machine with two
GPUs. It differs from the other implementations: rows travel in bfloat16 both ways, and DeepEP adds the ranks' partial
sums itself, so that results depend on the number of ranks by rounding. Within one node, rows come by source rank, then
by token; across nodes DeepEP chooses their order.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.distributed as dist

from sgl_batch.errors import ConfigError
from sgl_batch.layers.moe.token_dispatcher.base import Received, TokenDispatcher

# DeepEP moves rows in units of this many bytes.
_UNIT_BYTES = 16


class DeepEPDispatcher(TokenDispatcher):
    """`Buffer.get_dispatch_layout` and `Buffer.dispatch` to dispatch, `Buffer.combine` to combine; each call waits."""

    exact_order: ClassVar[bool] = False

    def __init__(self, group: dist.ProcessGroup, *, num_experts: int, hidden_size: int) -> None:
        """Allocate DeepEP's buffers, which is a collective over the group."""
        super().__init__(shard=group.rank(), num_shards=group.size(), num_experts=num_experts, hidden_size=hidden_size)
        try:
            from deep_ep import Buffer
        except ImportError as error:
            raise ConfigError(
                f"the token dispatcher deepep needs the package deep_ep, which cannot be imported ({error}); install "
                "it on a machine with NVLink GPUs (pip install sgl-deep-ep), or choose the token dispatcher nccl"
            ) from error
        row_bytes = hidden_size * torch.bfloat16.itemsize
        if row_bytes % _UNIT_BYTES:
            raise ConfigError(
                f"hidden_size is {hidden_size}; the token dispatcher deepep needs a multiple of "
                f"{_UNIT_BYTES // torch.bfloat16.itemsize}: choose the token dispatcher nccl"
            )
        num_shards = self.num_shards
        configs = (Buffer.get_dispatch_config(num_shards), Buffer.get_combine_config(num_shards))
        self._buffer: Any = Buffer(
            group,
            max(config.get_nvl_buffer_size_hint(row_bytes, num_shards) for config in configs),
            max(config.get_rdma_buffer_size_hint(row_bytes, num_shards) for config in configs),
        )

    def _check_tokens(self, x_TM: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor) -> None:
        super()._check_tokens(x_TM, ids_TK, weights_TK)
        if x_TM.dtype != torch.bfloat16:
            raise ValueError(f"x_TM is {x_TM.dtype}; the token dispatcher deepep sends torch.bfloat16 alone")

    def _send_tokens(self, x_TM: torch.Tensor, topk_ids_TK: torch.Tensor, topk_weights_TK: torch.Tensor) -> Received:
        ids_TK = topk_ids_TK.to(torch.int64).contiguous()
        per_rank, per_rdma_rank, per_expert, is_token_in_rank, _ = self._buffer.get_dispatch_layout(
            ids_TK, self.num_experts
        )
        x_RM, ids_RK, weights_RK, _, handle, _ = self._buffer.dispatch(
            x_TM.contiguous(),
            topk_idx=ids_TK,
            topk_weights=topk_weights_TK.contiguous(),
            num_tokens_per_rank=per_rank,
            num_tokens_per_rdma_rank=per_rdma_rank,
            is_token_in_rank=is_token_in_rank,
            num_tokens_per_expert=per_expert,
        )
        return Received(x_RM=x_RM, ids_RK=ids_RK.to(torch.int32), weights_RK=weights_RK, routes=handle)

    def _return_partials(self, partial_RM: torch.Tensor, received: Received) -> torch.Tensor:
        out_TM: torch.Tensor = self._buffer.combine(partial_RM.to(torch.bfloat16).contiguous(), received.routes)[0]
        return out_TM.to(torch.float32)
