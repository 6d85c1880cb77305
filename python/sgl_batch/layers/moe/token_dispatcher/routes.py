"""Owns which of a rank's tokens go to which expert shard. Dispatchers send them.

Shape suffixes: T tokens, K experts per token, W shards, S rows sent.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Routes:
    """The rows that one rank sends, ordered by target shard, then by token."""

    num_tokens: int
    tokens_S: torch.Tensor  # int64, the token of each row
    shards_S: torch.Tensor  # int64, the target shard of each row
    num_rows_W: torch.Tensor  # int64, on the tokens' device
    idle_tokens: torch.Tensor  # int64, the tokens without an expert


def plan_routes(topk_ids_TK: torch.Tensor, *, num_shards: int, num_local_experts: int) -> Routes:
    """Plan one row for each pair of a token and a shard that has at least one of the token's experts."""
    owners_TK = torch.div(topk_ids_TK, num_local_experts, rounding_mode="floor")  # -1 stays -1: no shard
    shards_W11 = torch.arange(num_shards, device=topk_ids_TK.device, dtype=owners_TK.dtype)[:, None, None]
    wanted_WT = (owners_TK == shards_W11).any(2)
    shards_S, tokens_S = wanted_WT.nonzero().unbind(1)
    return Routes(
        num_tokens=len(topk_ids_TK),
        tokens_S=tokens_S,
        shards_S=shards_S,
        num_rows_W=wanted_WT.sum(1),
        idle_tokens=(~wanted_WT.any(0)).nonzero().squeeze(1),
    )


def masked_choices(
    topk_ids_TK: torch.Tensor, topk_weights_TK: torch.Tensor, routes: Routes, *, num_local_experts: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each row's local ids at its receiver [S, K] in int32 and weights; -1 and 0 for other shards' experts."""
    local_SK = (
        topk_ids_TK[routes.tokens_S].to(torch.int32) - (routes.shards_S * num_local_experts).to(torch.int32)[:, None]
    )
    others_SK = (local_SK < 0) | (local_SK >= num_local_experts)
    weights_SK = topk_weights_TK[routes.tokens_S].masked_fill(others_SK, 0.0)
    return local_SK.masked_fill(others_SK, -1), weights_SK
