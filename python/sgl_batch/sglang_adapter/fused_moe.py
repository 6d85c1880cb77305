"""Adapts SGLang's fused expert kernels to an `ExpertRunner`, to measure and test them against ours. Not yet run.

In an engine, SGLang calls these kernels itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from sgl_batch.sglang_adapter import bootstrap

with bootstrap.importing():
    from sglang.srt.layers.moe.moe_runner.base import MoeRunnerConfig
    from sglang.srt.layers.moe.moe_runner.triton_utils.fused_moe import fused_experts
    from sglang.srt.layers.moe.topk import StandardTopKOutput
    from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler

if TYPE_CHECKING:
    import torch


class Clamped(Protocol):
    """Experts with biases and a clamped activation (layers/moe/clamped_experts)."""

    @property
    def w13_bias(self) -> torch.Tensor: ...
    @property
    def w2_bias(self) -> torch.Tensor: ...
    @property
    def alpha(self) -> float: ...
    @property
    def limit(self) -> float: ...


def prepare_process(model_path: str) -> None:
    """Set the global arguments that SGLang's kernels read. Call it once in a process that runs no engine."""
    set_global_server_args_for_scheduler(ServerArgs(model_path=model_path))


def sglang_experts(
    x_TM: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    topk_weights_TK: torch.Tensor,
    topk_ids_TK: torch.Tensor,
    *,
    f32_output: bool = False,
    clamped: Clamped | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute experts with SGLang's fused kernels: an `ExpertRunner` (layers/moe/expert_runner).

    It sums in x's number type, whatever that of its output.
    """
    import torch

    # SGLang looks for negative ids only if the number of all experts differs from that of local experts.
    alpha, limit = (None, None) if clamped is None else (clamped.alpha, clamped.limit)
    config = MoeRunnerConfig(
        num_experts=None, num_local_experts=len(w13), inplace=False, gemm1_alpha=alpha, gemm1_clamp_limit=limit
    )
    biases = (None, None) if clamped is None else (clamped.w13_bias, clamped.w2_bias)
    topk = StandardTopKOutput(topk_weights=topk_weights_TK.float(), topk_ids=topk_ids_TK.int(), router_logits=None)
    out_TM = fused_experts(x_TM, w13, w2, topk, config, *biases)
    ids_R = torch.where(topk_ids_TK < 0, len(w13), topk_ids_TK).flatten()
    rows_per_expert = torch.bincount(ids_R, minlength=len(w13) + 1)[:-1]
    return out_TM.float() if f32_output else out_TM, rows_per_expert
