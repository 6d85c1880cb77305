"""Layers of experts as SGLang declares them: its own class needs its whole process."""

from __future__ import annotations

from types import SimpleNamespace

import torch


class Experts(torch.nn.Module):
    """A layer of experts with `experts` of them on this rank."""

    def __init__(self, experts: int, dtype: torch.dtype, *, hidden: int, inter: int) -> None:
        super().__init__()
        self.w13_weight = torch.nn.Parameter(torch.zeros(experts, 2 * inter, hidden, dtype=dtype), requires_grad=False)
        self.w2_weight = torch.nn.Parameter(torch.zeros(experts, hidden, inter, dtype=dtype), requires_grad=False)
        plain = {"gemm1_alpha": None, "gemm1_clamp_limit": None, "gate_up_interleaved": False}
        self.quant_method = SimpleNamespace(moe_runner_config=SimpleNamespace(**plain))


def expert_layers(model: torch.nn.Module) -> list[Experts]:
    return [module for module in model.modules() if isinstance(module, Experts)]
