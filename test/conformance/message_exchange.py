"""Owns the exchange of one layer's tokens by messages from rank to rank; ranks may have attention, experts or both.

Shape suffixes: T tokens, S rows sent, R rows, M hidden.
"""

from __future__ import annotations

import torch
from dispatch_cases import Case
from dispatch_reference import expert_sum

from sgl_batch.core.topology import Topology
from sgl_batch.layers.moe.token_dispatcher.point_to_point import PointToPoint, Rows
from sgl_batch.layers.moe.token_dispatcher.rank_tree import sum_over_ranks
from sgl_batch.layers.moe.token_dispatcher.routes import Routes, masked_choices, plan_routes

SOON_S = 20.0
LAYER = 5


class MessageExchange:
    """One rank's part. Expert ranks answer each message with sums; attention ranks add the sums by expert shard."""

    def __init__(self, topology: Topology, rank: int, messages: PointToPoint, case: Case) -> None:
        self._topology, self._rank, self._messages, self._case = topology, rank, messages, case
        self._part = topology.parts[rank]
        self._num_local = case.num_experts // topology.num_expert_shards
        self._sums: dict[int, torch.Tensor] = {}

    def run(self) -> torch.Tensor | None:
        """Return the outputs [T, M] of this rank's tokens; None if it has no attention."""
        routes = None if self._part.attention_rank is None else self._send_tokens(self._part.attention_rank)
        num_to_answer = 0 if self._part.expert_shard is None else self._topology.num_attention_ranks
        num_to_answer -= self._part.attention_rank is not None and num_to_answer > 0  # its own tokens need no message
        num_sums = 0 if routes is None else self._topology.num_expert_shards
        while num_to_answer or len(self._sums) < num_sums:
            source, got = self._messages.receive(SOON_S)
            assert got.layer == LAYER
            if got.ids_RK.shape[1]:
                num_to_answer -= 1
                self._messages.send(source, self._answer(got))
            else:
                shard = self._topology.parts[source].expert_shard
                assert shard is not None, f"rank {source} has no experts"
                self._sums[shard] = got.x_RM
        if routes is None:
            return None
        sums = [self._sums[shard] for shard in range(num_sums)]
        tokens_S = routes.tokens_S.split(routes.num_rows_W.tolist())
        return sum_over_ranks(tokens_S, sums, routes.num_tokens).index_fill_(0, routes.idle_tokens, 0.0)

    def _send_tokens(self, attention_rank: int) -> Routes:
        x_TM, ids_TK, weights_TK = self._case.shard(attention_rank, self._topology.num_attention_ranks)
        num_local = self._num_local
        routes = plan_routes(ids_TK, num_shards=self._topology.num_expert_shards, num_local_experts=num_local)
        ids_SK, weights_SK = masked_choices(ids_TK, weights_TK, routes, num_local_experts=num_local)
        for shard in range(self._topology.num_expert_shards):
            mine_S = routes.shards_S == shard
            x_RM = x_TM[routes.tokens_S[mine_S]]
            rows = Rows(layer=LAYER, x_RM=x_RM, ids_RK=ids_SK[mine_S], weights_RK=weights_SK[mine_S])
            (holder,) = self._topology.holders(shard)
            if holder == self._rank:
                self._sums[shard] = self._answer(rows).x_RM
            else:
                self._messages.send(holder, rows)
        return routes

    def _answer(self, got: Rows) -> Rows:
        assert self._part.expert_shard is not None, f"rank {self._rank} has no experts"
        first = self._part.expert_shard * self._num_local
        sums_RM = expert_sum(got.x_RM, got.ids_RK, got.weights_RK, first, self._num_local)
        none_R0 = torch.empty(len(sums_RM), 0)
        return Rows(layer=got.layer, x_RM=sums_RM, ids_RK=none_R0.to(torch.int32), weights_RK=none_R0)
