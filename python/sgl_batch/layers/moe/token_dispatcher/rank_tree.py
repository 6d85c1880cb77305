"""Owns the order in which the ranks' partial sums of a token are added up.

Shape suffixes: T tokens, S rows of all ranks, M hidden.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

# An absent row must add nothing: x + -0.0 is x for every x, but -0.0 + 0.0 is 0.0.
_NOTHING = -0.0


def sum_over_ranks(tokens_S: Sequence[torch.Tensor], rows_SM: Sequence[torch.Tensor], num_tokens: int) -> torch.Tensor:
    """Return the sums [T, M] in float32 of the ranks' rows; `tokens_S[rank]` has the token of each row.

    A range of ranks is the sum of its first half and its second half; the middle one of an odd number belongs to the
    first. A token has at most one row from each rank; a token without any row gets -0.0.
    """
    if len(rows_SM) == 1:
        out_TM = torch.full((num_tokens, rows_SM[0].shape[1]), _NOTHING, dtype=torch.float32, device=rows_SM[0].device)
        return out_TM.index_copy_(0, tokens_S[0], rows_SM[0])
    half = (len(rows_SM) + 1) // 2
    out_TM = sum_over_ranks(tokens_S[:half], rows_SM[:half], num_tokens)
    if len(rows_SM) - half == 1:
        # One rank's rows need no [T, M] of their own. Each token has one row here, so that no order is undefined.
        return out_TM.index_add_(0, tokens_S[half], rows_SM[half])
    return out_TM.add_(sum_over_ranks(tokens_S[half:], rows_SM[half:], num_tokens))
