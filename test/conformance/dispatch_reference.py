"""Owns the result that an exchange must give, computed by its definition in one process; shares no code with ours.

Shape suffixes: N tokens of all ranks, R rows of one rank, K experts per token, M hidden.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from dispatch_cases import Case

# For one expert, the rows that chose it and its output for each row.
ExpertTerm = Callable[[int], tuple[torch.Tensor, torch.Tensor]]


def tree_sum(term: ExpertTerm, first: int, last: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return which rows chose any of the experts [first, last), and their sums [R, M] in float32, in tree order.

    The sum of a range is that of its first half plus that of its second; the middle expert of an odd number belongs to
    the first half. An expert that a row did not choose is not added.
    """
    if last - first == 1:
        return term(first)
    middle = (first + last + 1) // 2
    left_R, left_RM = tree_sum(term, first, middle)
    right_R, right_RM = tree_sum(term, middle, last)
    both = (left_R & right_R)[:, None]
    return left_R | right_R, torch.where(both, left_RM + right_RM, torch.where(left_R[:, None], left_RM, right_RM))


def in_order_sum(term: ExpertTerm, first: int, last: int) -> torch.Tensor:
    """Return the same sum, added one expert after the other, which gives other bits."""
    chosen_R, out_RM = term(first)
    out_RM = out_RM * chosen_R[:, None]
    for expert in range(first + 1, last):
        chosen_R, term_RM = term(expert)
        out_RM = out_RM + term_RM * chosen_R[:, None]
    return out_RM


def expert_term(x_RM: torch.Tensor, ids_RK: torch.Tensor, weights_RK: torch.Tensor, first_expert: int) -> ExpertTerm:
    """Return a term in which an expert multiplies a row by its global id plus one; `ids_RK` start at `first_expert`."""

    def term(local_id: int) -> tuple[torch.Tensor, torch.Tensor]:
        chosen_RK = ids_RK == local_id
        weight_R1 = (weights_RK * chosen_RK).sum(1, keepdim=True)
        return chosen_RK.any(1), x_RM.to(torch.float32) * (first_expert + local_id + 1) * weight_R1

    return term


def expert_sum(
    x_RM: torch.Tensor, ids_RK: torch.Tensor, weights_RK: torch.Tensor, first_expert: int, num_experts: int
) -> torch.Tensor:
    """Return the weighted sums [R, M] of these experts, in tree order; 0 for a row that chose none."""
    chosen_R, out_RM = tree_sum(expert_term(x_RM, ids_RK, weights_RK, first_expert), 0, num_experts)
    return out_RM.masked_fill(~chosen_R[:, None], 0.0)


def expected_output(case: Case, world_size: int) -> torch.Tensor:
    """Return the outputs of all tokens [N, M]: each rank's experts are added in tree order, then the ranks."""
    num_local = case.num_experts // world_size
    term = expert_term(*case.batch(), 0)

    def rank_term(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        return tree_sum(term, rank * num_local, (rank + 1) * num_local)

    chosen_N, out_NM = tree_sum(rank_term, 0, world_size)
    return out_NM.masked_fill(~chosen_N[:, None], 0.0)


def expected_rows(case: Case, rank: int, world_size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return x, local ids and weights that this rank must receive, by sending rank and then by token."""
    x_NM, ids_NK, weights_NK = case.batch()
    num_local = case.num_experts // world_size
    first = rank * num_local
    mine_NK = (ids_NK >= first) & (ids_NK < first + num_local)
    rows = mine_NK.any(1)
    local_ids_NK = torch.where(mine_NK, ids_NK - first, -1)
    return x_NM[rows], local_ids_NK[rows], torch.where(mine_NK, weights_NK, 0.0)[rows]


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether both have the same type, shape and bytes: 0.0 and -0.0 differ."""
    return (
        one.dtype == other.dtype
        and one.shape == other.shape
        and torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))
    )
