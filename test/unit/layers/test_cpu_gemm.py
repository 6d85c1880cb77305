"""Products of rows with a weight are right in whichever number type the machine is quicker, and keep the rows' type."""

from __future__ import annotations

import pytest
import torch

from sgl_batch.layers import cpu_gemm
from sgl_batch.layers.cpu_gemm import compute_dtype, linear


@pytest.fixture(params=[True, False], ids=["native bf16", "bf16 through float32"])
def machine(request, monkeypatch):
    """A machine with bf16 instructions, or without."""
    monkeypatch.setattr(cpu_gemm, "bf16_is_native", lambda: request.param)
    return request.param


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.02)], ids=str)
@pytest.mark.parametrize("shape", [(1,), (7,), (8,), (64,), (65,), (200,), (4, 16)], ids=str)
@pytest.mark.parametrize("has_bias", [False, True])
def test_linear_equals_the_product_in_float64(shape, dtype, tolerance, has_bias):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(*shape, 24, generator=generator).to(dtype)
    weight = (torch.randn(16, 24, generator=generator) / 24**0.5).to(dtype)
    bias = torch.randn(16, generator=generator).to(dtype) if has_bias else None
    out = linear(x, weight, bias)
    expected = x.double() @ weight.double().T + (bias.double() if bias is not None else 0)
    assert (out.dtype, out.shape) == (dtype, (*shape, 16))
    assert torch.allclose(out.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize("num_rows", [1, 7, 8, 100])
def test_float32_rows_stay_float32_with_a_bf16_weight(num_rows):
    x, weight = torch.ones(num_rows, 24), torch.full((16, 24), 0.5, dtype=torch.bfloat16)
    out = linear(x, weight)
    assert out.dtype == torch.float32
    assert torch.equal(out, torch.full((num_rows, 16), 12.0))


def test_only_bf16_is_ever_converted_and_only_without_instructions_for_it(machine):
    assert compute_dtype(torch.float32) == torch.float32
    assert compute_dtype(torch.bfloat16) == (torch.bfloat16 if machine else torch.float32)
