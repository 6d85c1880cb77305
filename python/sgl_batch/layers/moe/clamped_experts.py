"""Owns the biases and the clamped activation of gpt-oss's experts. Shape suffixes as in expert_runner, J gate and up
together.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from sgl_batch.errors import ConfigError
from sgl_batch.sglang_adapter.types.models import ExpertLayer


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ClampedExperts:
    """Biases and activation of a layer's experts.

    An expert computes down(g * sigmoid(alpha * g) * (u + 1)); g is gate clamped to at most `limit`, u is up clamped to
    [-limit, limit]. Rows of w13 [E, 2I, M] alternate (gate, up, gate, up), and so does `w13_bias` [E, 2I]; `w2_bias`:
    [E, M]. Biases are float32 and are added to the products, before the weights of the choice.
    """

    w13_bias: torch.Tensor
    w2_bias: torch.Tensor
    alpha: float
    limit: float

    def mix(self, gate_up_RJ: torch.Tensor) -> torch.Tensor:
        """Return the input of the down product [R, I], from a gate and up product with its bias."""
        gate_RI = gate_up_RJ[:, 0::2].clamp(max=self.limit)
        up_RI = gate_up_RJ[:, 1::2].clamp(min=-self.limit, max=self.limit)
        return gate_RI * torch.sigmoid(gate_RI * self.alpha) * (up_RI + 1)

    def of_experts(self, experts_S: torch.Tensor) -> ClampedExperts:
        """Return this for a choice of the experts, by number [S]."""
        return replace(self, w13_bias=self.w13_bias[experts_S], w2_bias=self.w2_bias[experts_S])


def clamped_experts_of(layer: ExpertLayer) -> ClampedExperts | None:
    """Return the biases and activation of a layer's experts, or None for plain experts.

    Raises ConfigError for another form.
    """
    config = layer.quant_method.moe_runner_config
    w13_bias: torch.Tensor | None = getattr(layer, "w13_weight_bias", None)
    w2_bias: torch.Tensor | None = getattr(layer, "w2_weight_bias", None)
    alpha, limit = config.gemm1_alpha, config.gemm1_clamp_limit
    parts = {"w13_weight_bias": w13_bias, "w2_weight_bias": w2_bias, "gemm1_alpha": alpha, "gemm1_clamp_limit": limit}
    given = [name for name, part in parts.items() if part is not None]
    if not given:
        return None
    if w13_bias is None or w2_bias is None or alpha is None or limit is None or not config.gate_up_interleaved:
        raise ConfigError(
            "experts have biases and a clamped activation together, with rows of gate and up that alternate, or none "
            f"of these here; this model's have {', '.join(given)}, gate_up_interleaved={config.gate_up_interleaved}"
        )
    return ClampedExperts(w13_bias=w13_bias, w2_bias=w2_bias, alpha=alpha, limit=limit)


def in_halves(rows_EJ: torch.Tensor) -> torch.Tensor:
    """Return a copy of [E, 2I, ...] with the rows of gate above those of up, from one whose rows alternate."""
    return torch.cat((rows_EJ[:, 0::2], rows_EJ[:, 1::2]), 1)


def alternating(rows_EJ: torch.Tensor) -> torch.Tensor:
    """Return a copy whose rows alternate; it undoes `in_halves`."""
    return torch.stack(rows_EJ.chunk(2, 1), 2).flatten(1, 2)
