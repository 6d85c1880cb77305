"""Owns products of int8 with int8 by their definition, in torch: rows rounded one by one, sums exact."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def rounded_rows(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return whole numbers from -127 to 127 in float64, and each row's scale in float32."""
    exact = rows.float()
    scales = exact.abs().amax(-1, keepdim=True) / 127
    scales[scales == 0] = 1.0
    scales[~scales.isfinite()] = float("nan")
    return (exact / scales).round().clamp(-127, 127).nan_to_num(0.0).double(), scales


def product(rows: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return rows [R, K] times a weight of int8 [N, K] with the outputs' scales [N], in float32."""
    whole, row_scales = rounded_rows(rows)
    # Float64 holds all sums exactly. Each is rounded once to float32, and after each scale.
    return (whole @ weight.double().T).float() * row_scales * scales


def experts(
    x: torch.Tensor,
    w13: tuple[torch.Tensor, torch.Tensor],
    w2: tuple[torch.Tensor, torch.Tensor],
    weights: torch.Tensor,
    ids: torch.Tensor,
) -> torch.Tensor:
    """Return the sums of experts in float64; `w13` and `w2`: int8 [E, N, K] with their scales [E, N]."""
    out = torch.zeros(x.shape, dtype=torch.float64)
    for expert in range(len(w13[0])):
        token, choice = torch.where(ids == expert)
        gate, up = product(x[token], w13[0][expert], w13[1][expert]).double().chunk(2, dim=-1)
        rows = product((F.silu(gate) * up).float(), w2[0][expert], w2[1][expert]).double()
        out.index_add_(0, token, rows * weights[token, choice, None].double())
    return out
