"""Owns the choice of experts in SGLang's layer on a CPU, by softmax or sigmoid; other choices stay SGLang's own."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch

from sgl_batch.layers.moe.grouped_topk import Grouping, grouped_topk
from sgl_batch.sglang_adapter.expert_choice import report_choice, scoring_of
from sgl_batch.sglang_adapter.layers import TopK, register_forward


def register(kernels: ModuleType | None, dispatch_key: str) -> None:
    """Let SGLang's layer class choose with `choose`, on the platform of the given key."""

    # SGLang binds it to its layer, which works for a plain function only, not for a partial.
    def forward(topk: Any, hidden_states: torch.Tensor, router_logits: torch.Tensor, **given: Any) -> Any:
        return choose(kernels, topk, hidden_states, router_logits, **given)

    register_forward(TopK, forward, dispatch_key)


def choose(
    kernels: ModuleType | None, topk: Any, hidden_states: torch.Tensor, router_logits: torch.Tensor, **given: Any
) -> Any:
    """Choose experts for SGLang's layer `topk`: for rows [T, M] with logits [T, E]. `kernels`: as in grouped_topk."""
    scoring = scoring_of(topk, given)
    known = router_logits.dtype in (torch.bfloat16, torch.float32) and router_logits.stride(-1) == 1
    if scoring is None or not known:
        return topk.forward_native(hidden_states, router_logits, **given)
    config = topk.topk_config
    groups, kept = (config.num_expert_group, config.topk_group) if config.use_grouped_topk else (1, 1)
    weights_TK, ids_TK = grouped_topk(
        router_logits,
        Grouping(groups=groups, kept_groups=kept, top_k=config.top_k),
        scoring=scoring,
        bias_E=config.correction_bias,
        renormalize=config.renormalize,
        kernels=kernels,
    )
    return report_choice(topk, weights_TK, ids_TK, router_logits)
