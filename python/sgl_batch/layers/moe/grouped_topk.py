"""Owns the choice of experts on a CPU: the best experts of a row's best groups, or of all.

DeepSeek-V2 scores by softmax and ranks a group by its best expert. DeepSeek-V3 scores by sigmoid, adds a bias to each
expert for the choice only, and ranks a group by its two best experts. A row's result has the same bits whatever the
other rows are.
Shape suffixes: T rows, E experts, N groups, K choices.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Grouping:
    """The number of groups, how many of them a row may choose from, and how many experts it chooses."""

    groups: int
    kept_groups: int
    top_k: int


def grouped_topk(
    logits_TE: torch.Tensor,
    grouping: Grouping,
    *,
    scoring: str,
    bias_E: torch.Tensor | None,
    renormalize: bool,
    kernels: ModuleType | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return weights (float32) and ids (int32) of each row's experts, both [T, K].

    `scoring`: "softmax" or "sigmoid". `kernels`: the module `sgl_batch_kernel`, or None if it is not installed. It
    needs logits and bias in bf16 or float32, and chooses the lower id among equal scores; torch chooses any of them.
    """
    if kernels is not None:
        done: tuple[torch.Tensor, torch.Tensor] = kernels.topk(
            logits_TE,
            grouping.top_k,
            renormalize=renormalize,
            scoring=scoring,
            bias_E=bias_E,
            groups=grouping.groups,
            kept_groups=grouping.kept_groups,
        )
        return done
    scores_TE = _scores(logits_TE, scoring)
    ranked_TE = scores_TE if bias_E is None else scores_TE + bias_E.to(torch.float32)
    if grouping.kept_groups < grouping.groups:
        by_group_TNE = ranked_TE.unflatten(1, (grouping.groups, -1))
        best_TNX = by_group_TNE.topk(1 if bias_E is None else 2, dim=-1).values
        kept_TX = best_TNX.sum(-1).topk(grouping.kept_groups, dim=-1).indices
        out_TN = torch.ones(by_group_TNE.shape[:2], dtype=torch.bool).scatter_(1, kept_TX, False)
        ranked_TE = by_group_TNE.masked_fill(out_TN[..., None], float("-inf")).flatten(1)
    ids_TK = ranked_TE.topk(grouping.top_k, dim=-1).indices
    weights_TK = scores_TE.gather(1, ids_TK)
    if renormalize:
        weights_TK = weights_TK / _row_sums(weights_TK)
    return weights_TK, ids_TK.to(torch.int32)


def _scores(logits_TE: torch.Tensor, scoring: str) -> torch.Tensor:
    """Return scores in float32.

    Sigmoid is computed in float64: torch's float32 sigmoid rounds the last few numbers of a tensor differently.
    """
    if scoring == "sigmoid":
        return logits_TE.to(torch.float64).sigmoid().to(torch.float32)
    assert scoring == "softmax", f"{scoring!r} is no scoring of experts"
    return logits_TE.to(torch.float32).softmax(dim=-1)


def _row_sums(weights_TK: torch.Tensor) -> torch.Tensor:
    """Return the sums of rows [T, 1], added up one choice after the other."""
    total_T = weights_TK[:, 0].clone()
    for choice_T in weights_TK.unbind(1)[1:]:
        total_T += choice_T
    return total_T[:, None]
