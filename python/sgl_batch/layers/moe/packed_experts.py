"""Owns the call of the native kernels with packed experts, in the forms that the kernels take."""

from __future__ import annotations

from functools import partial
from types import ModuleType

import torch

from sgl_batch.layers.moe.clamped_experts import ClampedExperts, in_halves


def biases_of(clamped: ClampedExperts) -> tuple[torch.Tensor, torch.Tensor]:
    """Return biases as the kernels take them, float32: of w13 [E, 2I], those of gates first, and of w2 [E, M]."""
    return in_halves(clamped.w13_bias.float()), clamped.w2_bias.float().contiguous()


def packed_experts(
    kernels: ModuleType,
    x_TM: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    topk_weights_TK: torch.Tensor,
    topk_ids_TK: torch.Tensor,
    *,
    f32_output: bool,
    w13_scales: torch.Tensor | None,
    w2_scales: torch.Tensor | None,
    int8_rows: bool = False,
    slots: torch.Tensor | None = None,
    marks: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None),
    clamped: ClampedExperts | None = None,
    biases: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Call the kernels' `experts` or `experts_int8` with packed weights.

    The other tensors are converted to the form that it needs. `slots`, and `marks` of w13 and of w2, are for `experts`.
    `biases`: what `biases_of` gives, if it is known.
    """
    assert slots is None or not int8_rows, "streamed experts meet rows as they are"
    run = kernels.experts_int8
    if not int8_rows:
        run = partial(kernels.experts, slots=slots, w13_marks=marks[0], w2_marks=marks[1])
    activation: dict[str, object] = {}
    if clamped is not None:
        w13_bias, w2_bias = biases_of(clamped) if biases is None else biases
        activation = {"w13_bias": w13_bias, "w2_bias": w2_bias, "alpha": clamped.alpha, "limit": clamped.limit}
    done: tuple[torch.Tensor, torch.Tensor] = run(
        x_TM if x_TM.stride(-1) == 1 else x_TM.contiguous(),
        w13,
        w2,
        topk_weights_TK.to(torch.float32).contiguous(),
        topk_ids_TK.to(torch.int32).contiguous(),
        f32_output=f32_output,
        w13_scales=w13_scales,
        w2_scales=w2_scales,
        **activation,
    )
    return done
