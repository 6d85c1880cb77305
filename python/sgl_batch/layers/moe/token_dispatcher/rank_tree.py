"""Owns the order in which the ranks' partial sums of a token are added up.

Shape suffixes: T tokens, S rows of all ranks, M hidden.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

# What is absent must add nothing: x + -0.0 is x for every x, while -0.0 + 0.0 would be 0.0.
_NOTHING = -0.0


def sum_over_ranks(tokens_S: Sequence[torch.Tensor], rows_SM: Sequence[torch.Tensor], num_tokens: int) -> torch.Tensor:
    """The sums [T, M] in float32 of each rank's rows, where `tokens_S[rank]` says to which token a row belongs.

    A range of ranks is the sum of its first half and its second; the middle one of an odd number belongs to the first.
    A token has at most one row from each rank; one that has none at all gets -0.0.
    """
    if len(rows_SM) == 1:
        out_TM = torch.full((num_tokens, rows_SM[0].shape[1]), _NOTHING, dtype=torch.float32, device=rows_SM[0].device)
        return out_TM.index_copy_(0, tokens_S[0], rows_SM[0])
    half = (len(rows_SM) + 1) // 2
    out_TM = sum_over_ranks(tokens_S[:half], rows_SM[:half], num_tokens)
    if len(rows_SM) - half == 1:
        # Without a [T, M] of its own for one rank's rows. Each token is there once, so that the order is not at stake.
        return out_TM.index_add_(0, tokens_S[half], rows_SM[half])
    return out_TM.add_(sum_over_ranks(tokens_S[half:], rows_SM[half:], num_tokens))
