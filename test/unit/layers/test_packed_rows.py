"""Rows of a packed weight are those of the plain one, so that an embedding may be an output projection too."""

from __future__ import annotations

import pytest
import torch

from sgl_batch.kernel_loader import native_kernels
from sgl_batch.layers.packed_weights import PackedWeights


@pytest.mark.parametrize("kernels", [native_kernels(), None], ids=["native", "torch"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("outputs", [6, 64, 70])
def test_rows_of_a_packed_weight_are_those_of_the_plain_one(kernels, dtype, outputs):
    weight = torch.randn(outputs, 10).to(dtype)
    plain, packed = weight.clone(), PackedWeights(kernels)
    assert packed.add_linear(weight) == (kernels is not None)
    for ids in (torch.arange(outputs), torch.tensor([[outputs - 1, 0], [3, 3]]), torch.empty(0, dtype=torch.int64)):
        assert torch.equal(packed.rows(ids, weight), plain[ids])
