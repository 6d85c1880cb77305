"""Owns the choice of experts by softmax under SGLang's layer by the native kernel; other choices stay SGLang's own."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch

from sgl_batch.sglang_adapter.expert_choice import choice_made, is_plain_choice
from sgl_batch.sglang_adapter.layers import TopK, register_forward


def register(kernels: ModuleType, dispatch_key: str) -> None:
    """Put the kernel under SGLang's layer class on the platform of the given key."""

    def choose(topk: Any, hidden_states: torch.Tensor, router_logits: torch.Tensor, **given: Any) -> Any:
        known = router_logits.dtype in (torch.bfloat16, torch.float32) and router_logits.stride(-1) == 1
        if not known or not is_plain_choice(topk, given):
            return topk.forward_native(hidden_states, router_logits, **given)
        config = topk.topk_config
        weights_TK, ids_TK = kernels.topk(router_logits, config.top_k, renormalize=config.renormalize)
        return choice_made(topk, weights_TK, ids_TK, router_logits)

    register_forward(TopK, choose, dispatch_key)
