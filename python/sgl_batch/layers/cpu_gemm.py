"""Owns matrix products with plain weights on a CPU: their number type and their orientation.

A CPU without bf16 instructions multiplies bf16 several times slower than float32, and oneDNN compiles a kernel for
every new number of rows. On such a CPU a weight is converted to float32 when it is used: it is read from memory once,
as bf16, and BLAS finds the converted weight in the cache.
"""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F

# The least rows for which converting a weight pays.
_UPCAST_ROWS = 8
# The most rows for which BLAS is faster with the weight on the left (measured: 768 x 1024, 2 AVX512 cores, 2 to 64
# rows).
_WEIGHT_LEFT_ROWS = 64


@cache
def bf16_is_native() -> bool:
    """Return whether this CPU has bf16 instructions (AVX512-BF16 or AMX); otherwise float32 is faster."""
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the number type for rows of `dtype` between products, and for products of many rows."""
    return torch.float32 if dtype == torch.bfloat16 and not bf16_is_native() else dtype


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Multiply rows [..., in] by a weight [out, in], plus a bias [out]; the result has x's number type."""
    rows = x.reshape(-1, x.shape[-1])
    dtype = compute_dtype(weight.dtype) if len(rows) >= _UPCAST_ROWS else weight.dtype
    out = _product(rows.to(dtype), weight.to(dtype))
    if bias is not None:
        out = out + bias.to(dtype)
    return out.reshape(*x.shape[:-1], -1).to(x.dtype)


def _product(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    if rows.dtype == torch.float32 and 1 < len(rows) <= _WEIGHT_LEFT_ROWS:
        return torch.mm(weight, rows.t()).t()
    return F.linear(rows, weight)
