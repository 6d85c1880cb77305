"""The small operators of a pass that all ranks compute together, each with its own experts, typed.

Shape suffixes: T tokens, K experts per token, R ranks, M hidden.
"""

from __future__ import annotations

import torch

_ops = torch.ops.sgl_batch_kernel


def own_choices(ids_TK: torch.Tensor, first: int, count: int) -> torch.Tensor:
    """The choices of `count` experts from the `first` one on, as their numbers among those, -1 for others; int32."""
    own: torch.Tensor = _ops.own_choices(ids_TK, first, count)
    return own


def sum_partials_(to_TM: torch.Tensor, partials_TRM: torch.Tensor, ids_TK: torch.Tensor, num_experts: int) -> None:
    """Write the sums of the ranks' partial sums of the same tokens, float32, with the bits of `exchange_combine`.

    `ids_TK`: int32, among all experts, of which each rank has an equal shard. The row of a rank without an expert of a
    token counts as nothing; a token without any gets 0.
    """
    _ops.sum_partials_(to_TM, partials_TRM, ids_TK, num_experts)
