"""MLPs that the kernels take are computed in one call; those of other weights stay SGLang's."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from sgl_batch.kernel_loader import native_kernels
from sgl_batch.layers.packed_weights import PackedWeights
from sgl_batch.model_executor.cpu_mlp import CpuMlps
from sgl_batch.sglang_adapter.layers import UnquantizedLinearMethod

HIDDEN, INTER = 32, 48


class Linear(torch.nn.Module):
    """The attributes that are read of SGLang's linear layers."""

    def __init__(self, outputs: int, inputs: int, *, bias: bool, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter((torch.randn(outputs, inputs) / 6).to(dtype), requires_grad=False)
        self.bias = torch.zeros(outputs) if bias else None
        self.quant_method = UnquantizedLinearMethod()


class LlamaMLP(torch.nn.Module):
    """It says that it was asked, where SGLang's computes."""

    def __init__(self, *, bias: bool = False, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.gate_up_proj = Linear(2 * INTER, HIDDEN, bias=bias, dtype=dtype)
        self.down_proj = Linear(HIDDEN, INTER, bias=bias, dtype=dtype)

    def forward(self, hidden: torch.Tensor, forward_batch: object = None) -> torch.Tensor:
        return hidden.new_full(hidden.shape, 7.0)


@pytest.fixture
def weights() -> PackedWeights:
    kernels = native_kernels()
    assert kernels is not None, "the native kernels are installed where tests run"
    return PackedWeights(kernels)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rows", [1, 40])
def test_an_mlp_is_silu_of_gate_times_up_and_down(weights, dtype, rows):
    mlp, x = LlamaMLP(dtype=dtype), torch.randn(rows, HIDDEN).to(dtype)
    gate, up = F.linear(x.float(), mlp.gate_up_proj.weight.float()).chunk(2, dim=-1)
    expected = F.linear(F.silu(gate) * up, mlp.down_proj.weight.float())
    CpuMlps(weights).adopt(torch.nn.Sequential(mlp))
    for found in (mlp(x), mlp(x, forward_batch=None)):
        assert found.dtype == dtype
        assert torch.allclose(found.float(), expected, atol=1e-5 if dtype == torch.float32 else 0.05)


@pytest.mark.parametrize("kind", [{"bias": True}, {"dtype": torch.float16}], ids=str)
def test_an_mlp_with_biases_or_of_another_number_type_stays_sglangs(weights, kind):
    mlp = LlamaMLP(**kind)
    CpuMlps(weights).adopt(torch.nn.Sequential(mlp))
    assert torch.equal(mlp(torch.zeros(2, HIDDEN)), torch.full((2, HIDDEN), 7.0))
