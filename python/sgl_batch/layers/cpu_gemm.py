"""Owns which number type a CPU multiplies matrices in. The callers own the matrices."""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F

# Rows from which converting a bf16 weight to float32 for one product pays, on a CPU without bf16 instructions:
# measured with 768 x 1024 weights on 2 AVX512 cores, 20 against 33 GFLOP/s at 64 rows, 12 against 11 at 16.
_UPCAST_ROWS = 32


@cache
def bf16_is_native() -> bool:
    """Whether this CPU multiplies bf16 itself (AVX512-BF16 or AMX); otherwise float32 is quicker."""
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


def compute_dtype(dtype: torch.dtype, num_rows: int) -> torch.dtype:
    """The number type in which to multiply `num_rows` rows of `dtype`."""
    pays = dtype == torch.bfloat16 and num_rows >= _UPCAST_ROWS and not bf16_is_native()
    return torch.float32 if pays else dtype


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """F.linear of rows [..., in] with a weight [out, in], in the quicker number type; the result has x's."""
    dtype = compute_dtype(x.dtype, x.numel() // x.shape[-1])
    out = F.linear(x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))
    return out.to(x.dtype)
