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


def sum_of_partials(partials_TRM: torch.Tensor, has_TR: torch.Tensor) -> torch.Tensor:
    """Return the sums [T, M] of the ranks' partial sums of the same tokens, in the same order.

    `has_TR`: whether a rank has an expert of a token; else its row counts as nothing. A token without any gets 0.
    `partials_TRM` is changed: few rows count as nothing, and a copy of all takes as long as the sums.
    """
    partials_TRM[(~has_TR).nonzero(as_tuple=True)] = _NOTHING
    sums_TM = _tree_sum(partials_TRM)
    sums_TM[~has_TR.any(1)] = 0.0
    return sums_TM


def _tree_sum(rows_TRM: torch.Tensor) -> torch.Tensor:
    ranks = rows_TRM.shape[1]
    if ranks == 1:
        return rows_TRM[:, 0]
    half = (ranks + 1) // 2
    return _tree_sum(rows_TRM[:, :half]) + _tree_sum(rows_TRM[:, half:])
