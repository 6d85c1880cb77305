"""Owns the exchange through torch.distributed's all-to-all: over gloo on CPUs, over NCCL on GPUs.

One class serves both, because torch.distributed has the same collective for both and only the device differs. On gloo,
all_to_all_single is as fast as our own sends and receives.

Shape suffixes: T tokens, K experts per token, M hidden, W ranks, R rows received, S rows sent, B bytes of a row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from sgl_batch.layers.moe.token_dispatcher.base import ROW_DTYPES, Received, TokenDispatcher
from sgl_batch.layers.moe.token_dispatcher.packed_rows import GrowingBuffer, RowFormat
from sgl_batch.layers.moe.token_dispatcher.rank_tree import sum_over_ranks
from sgl_batch.layers.moe.token_dispatcher.routes import Routes, masked_choices, plan_routes


@dataclass(frozen=True, slots=True, kw_only=True)
class _Trip:
    """The routes of this rank's rows, and the numbers of rows sent to and received from each rank."""

    routes: Routes
    num_sent: list[int]
    num_received: list[int]


class AllToAllDispatcher(TokenDispatcher):
    """Two collectives to dispatch (the numbers of rows, then the rows), one to combine.

    The dispatcher owns the buffers. Received rows are valid until its next `dispatch`; the others within a call only.
    """

    def __init__(self, group: dist.ProcessGroup, *, device: torch.device, num_experts: int, hidden_size: int) -> None:
        super().__init__(shard=group.rank(), num_shards=group.size(), num_experts=num_experts, hidden_size=hidden_size)
        self._group = group
        self._device = device
        self._outgoing = GrowingBuffer(device)
        self._incoming = GrowingBuffer(device)
        self._returned = GrowingBuffer(device)

    def _check_tokens(self, x_TM: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor) -> None:
        super()._check_tokens(x_TM, ids_TK, weights_TK)
        if x_TM.device != self._device:
            raise ValueError(f"x_TM is on {x_TM.device}; this dispatcher's group exchanges tensors on {self._device}")

    def _send_tokens(self, x_TM: torch.Tensor, topk_ids_TK: torch.Tensor, topk_weights_TK: torch.Tensor) -> Received:
        row_format = RowFormat(hidden_size=self.hidden_size, top_k=topk_ids_TK.shape[1], dtype=x_TM.dtype)
        routes = plan_routes(topk_ids_TK, num_shards=self.num_shards, num_local_experts=self.num_local_experts)
        num_sent, num_received = self._exchange_counts(routes.num_rows_W, row_format)
        sent_SB = self._outgoing.rows(sum(num_sent), row_format.row_bytes)
        x_SM, ids_SK, weights_SK = row_format.parts(sent_SB)
        torch.index_select(x_TM, 0, routes.tokens_S, out=x_SM)
        local_ids_SK, local_weights_SK = masked_choices(
            topk_ids_TK, topk_weights_TK, routes, num_local_experts=self.num_local_experts
        )
        ids_SK.copy_(local_ids_SK)
        weights_SK.copy_(local_weights_SK)
        received_RB = self._incoming.rows(sum(num_received), row_format.row_bytes)
        dist.all_to_all_single(received_RB, sent_SB, num_received, num_sent, group=self._group)
        x_RM, ids_RK, weights_RK = row_format.parts(received_RB)
        trip = _Trip(routes=routes, num_sent=num_sent, num_received=num_received)
        return Received(x_RM=x_RM, ids_RK=ids_RK, weights_RK=weights_RK, routes=trip)

    def _return_partials(self, partial_RM: torch.Tensor, received: Received) -> torch.Tensor:
        trip = received.routes
        assert isinstance(trip, _Trip), "the base class lets only this dispatcher's own Received through"
        routes = trip.routes
        row_bytes = self.hidden_size * torch.float32.itemsize
        rows_SM = self._returned.rows(sum(trip.num_sent), row_bytes).view(torch.float32)
        dist.all_to_all_single(rows_SM, partial_RM.contiguous(), trip.num_sent, trip.num_received, group=self._group)
        out_TM = sum_over_ranks(routes.tokens_S.split(trip.num_sent), rows_SM.split(trip.num_sent), routes.num_tokens)
        return out_TM.index_fill_(0, routes.idle_tokens, 0.0)

    def _exchange_counts(self, num_rows_W: torch.Tensor, row_format: RowFormat) -> tuple[list[int], list[int]]:
        """Return how many rows this rank sends to and gets from each rank.

        Raises ValueError, on all ranks, if their row formats differ.
        """
        own_format = (self.num_experts, self.hidden_size, row_format.top_k, ROW_DTYPES.index(row_format.dtype))
        sent_W5 = torch.tensor([(0, *own_format)] * self.num_shards, device=self._device)
        sent_W5[:, 0] = num_rows_W
        received_W5 = torch.empty_like(sent_W5)
        dist.all_to_all_single(received_W5, sent_W5, group=self._group)
        # One copy to the host for both: on a GPU it waits for all queued work.
        sent, received = torch.stack((sent_W5, received_W5)).tolist()
        for peer, (_, *peer_format) in enumerate(received):
            if tuple(peer_format) != own_format:
                raise ValueError(
                    f"rank {peer} sends rows of {_described(*peer_format)}, and rank {self.shard} of "
                    f"{_described(*own_format)}; all ranks must give the same"
                )
        return [row[0] for row in sent], [row[0] for row in received]


def _described(num_experts: int, hidden_size: int, top_k: int, dtype: int) -> str:
    return f"{hidden_size} {ROW_DTYPES[dtype]} with {top_k} of {num_experts} experts"
