"""Experts with biases are taken in one form, and refused by name in any other; their rows come back as they were."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from sgl_batch.errors import ConfigError
from sgl_batch.layers.moe.clamped_experts import alternating, clamped_experts_of, in_halves

FORM = {"gemm1_alpha": 1.702, "gemm1_clamp_limit": 7.0, "gate_up_interleaved": True}
BIASES = {"w13_weight_bias": torch.zeros(2, 6), "w2_weight_bias": torch.zeros(2, 4)}


def layer(biases: dict[str, torch.Tensor], **config: object) -> SimpleNamespace:
    return SimpleNamespace(
        quant_method=SimpleNamespace(moe_runner_config=SimpleNamespace(**{**FORM, **config})), **biases
    )


def test_the_form_is_read_from_the_layer_and_plain_experts_have_none():
    found = clamped_experts_of(layer(BIASES))
    assert found is not None
    assert (found.alpha, found.limit, found.w2_bias) == (1.702, 7.0, BIASES["w2_weight_bias"])
    assert clamped_experts_of(layer({}, gemm1_alpha=None, gemm1_clamp_limit=None)) is None


@pytest.mark.parametrize(
    ("biases", "config", "named"),
    [
        ({}, {}, "gemm1_alpha, gemm1_clamp_limit, gate_up_interleaved=True"),
        (BIASES, {"gemm1_alpha": None, "gemm1_clamp_limit": None}, "w13_weight_bias, w2_weight_bias, "),
        (BIASES, {"gate_up_interleaved": False}, "gate_up_interleaved=False"),
        ({}, {"gemm1_alpha": None}, "have gemm1_clamp_limit, "),
    ],
)
def test_another_form_is_refused_by_name(biases, config, named):
    with pytest.raises(ConfigError, match=named):
        clamped_experts_of(layer(biases, **config))


def test_rows_that_alternate_go_to_halves_and_back():
    rows = torch.arange(24).view(2, 6, 2)
    assert in_halves(rows)[0, :, 0].tolist() == [0, 4, 8, 2, 6, 10]
    assert torch.equal(alternating(in_halves(rows)), rows)
