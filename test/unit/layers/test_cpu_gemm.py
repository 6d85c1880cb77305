"""Products with weights are right packed and unpacked, keep the rows' number type, and know when weights change."""

from __future__ import annotations

import logging

import pytest
import torch

from sgl_batch.layers import cpu_gemm
from sgl_batch.layers.cpu_gemm import CpuGemm, compute_dtype

PLENTY = 1 << 20


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype) / shape[-1] ** 0.5


def exact(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    return x.double() @ weight.double().T + (0 if bias is None else bias.double())


def close(result: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-5) -> bool:
    return torch.allclose(result.double(), expected, rtol=tolerance, atol=tolerance)


SHAPES = pytest.mark.parametrize("shape", [(1,), (7,), (8,), (200,), (4, 16)], ids=str)
TYPES = pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.01)], ids=str)


@SHAPES
@TYPES
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("budget_bytes", [0, PLENTY], ids=["unpacked", "packed"])
def test_a_product_equals_the_one_in_float64_and_has_the_type_of_its_rows(
    shape, dtype, tolerance, has_bias, budget_bytes
):
    x, weight = draw(*shape, 24, dtype=dtype), draw(16, 24, dtype=dtype, seed=1)
    bias = draw(16, dtype=dtype, seed=2) if has_bias else None
    gemm = CpuGemm(budget_bytes)
    for _ in range(2):
        out = gemm.linear(x, weight, bias)
        assert (out.dtype, out.shape) == (dtype, (*shape, 16))
        assert close(out, exact(x, weight, bias), tolerance)


@SHAPES
@pytest.mark.parametrize("is_native", [True, False])
def test_unpacked_bf16_is_right_on_machines_with_and_without_instructions_for_it(shape, is_native, monkeypatch):
    monkeypatch.setattr(cpu_gemm, "bf16_is_native", lambda: is_native)
    x, weight = draw(*shape, 24, dtype=torch.bfloat16), draw(16, 24, dtype=torch.bfloat16, seed=1)
    out = CpuGemm(0).linear(x, weight)
    assert out.dtype == torch.bfloat16
    assert close(out, exact(x, weight), 0.01)


def test_a_bf16_product_through_float32_loses_no_more_than_the_last_rounding(monkeypatch):
    monkeypatch.setattr(cpu_gemm, "bf16_is_native", lambda: False)
    x, weight = draw(40, 300, dtype=torch.bfloat16), draw(16, 300, dtype=torch.bfloat16, seed=1)
    for budget_bytes in (0, PLENTY):
        out = CpuGemm(budget_bytes).linear(x, weight)
        assert close(out, exact(x, weight), 2.0**-8)


@pytest.mark.parametrize("is_native", [True, False])
def test_only_bf16_is_converted_and_only_without_instructions_for_it(is_native, monkeypatch):
    monkeypatch.setattr(cpu_gemm, "bf16_is_native", lambda: is_native)
    assert compute_dtype(torch.float32) == torch.float32
    assert compute_dtype(torch.bfloat16) == (torch.bfloat16 if is_native else torch.float32)


def test_each_experts_weight_is_told_from_its_neighbours():
    gemm, x, weights = CpuGemm(PLENTY), draw(5, 24), draw(4, 16, 24, seed=1)
    for _ in range(2):
        for weight in weights:
            assert close(gemm.linear(x, weight), exact(x, weight))


def test_a_packed_weight_is_used_until_it_is_forgotten():
    gemm, x, weight = CpuGemm(PLENTY), draw(5, 24), draw(16, 24, seed=1)
    before = gemm.linear(x, weight)
    weight.mul_(2)
    assert torch.equal(gemm.linear(x, weight), before)
    gemm.forget()
    assert close(gemm.linear(x, weight), exact(x, weight))


def test_weights_beyond_the_budget_are_multiplied_unpacked_which_is_said_once(caplog):
    gemm, x, weights = CpuGemm(2 * 16 * 24 * 4), draw(5, 24), draw(6, 16, 24, seed=1)
    with caplog.at_level(logging.WARNING):
        for weight in (*weights, *weights):
            assert close(gemm.linear(x, weight), exact(x, weight))
    (said,) = caplog.records
    assert "do not all fit" in said.getMessage()
    weights.mul_(2)
    outdated = [not close(gemm.linear(x, weight), exact(x, weight)) for weight in weights]
    assert outdated == [True, True, False, False, False, False], "exactly two weights fit the budget"


def test_forgotten_weights_give_their_room_back():
    weights = draw(6, 16, 24, seed=1)
    gemm, x = CpuGemm(6 * 16 * 24 * 4), draw(5, 24)
    for _ in range(3):
        for weight in weights:
            gemm.linear(x, weight)
        weights.mul_(2)
        assert not any(close(gemm.linear(x, weight), exact(x, weight)) for weight in weights), "all are packed"
        gemm.forget()
