"""Owns matrix products with weights on a CPU: in which number type, and with weights packed once. Not the weights.

oneDNN lays a weight out anew at every product unless it is given packed. A CPU without bf16 instructions multiplies
bf16 several times slower than float32, so there the packed copy is float32.
"""

from __future__ import annotations

import logging
from functools import cache

import torch
import torch.nn.functional as F

logger = logging.getLogger(__name__)

# Rows from which converting a bf16 weight to float32 for one product pays, on a CPU without bf16 instructions.
_UPCAST_ROWS = 8


@cache
def bf16_is_native() -> bool:
    """Whether this CPU multiplies bf16 itself (AVX512-BF16 or AMX); otherwise float32 is quicker."""
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The number type in which packed weights of `dtype` are kept and multiplied."""
    return torch.float32 if dtype == torch.bfloat16 and not bf16_is_native() else dtype


class CpuGemm:
    """Products x @ weight.T. Packs each two-dimensional weight on first use while `budget_bytes` last.

    A packed copy stands beside the weight, so whoever writes into weights calls `forget` afterwards.
    """

    def __init__(self, budget_bytes: int) -> None:
        self._budget_bytes = self._left_bytes = budget_bytes
        self._packed: dict[int, torch.Tensor | None] = {}

    def forget(self) -> None:
        """Drop all packed copies: the weights have changed."""
        self._packed.clear()
        self._left_bytes = self._budget_bytes

    def rows_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The number type in which to keep rows of `dtype` between products: the one that products are made in."""
        return compute_dtype(dtype) if self._budget_bytes > 0 else dtype

    def linear(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Rows [..., in] times a weight [out, in], plus a bias [out]; the result has x's number type."""
        packed = self._pack(weight)
        if packed is not None:
            dtype = compute_dtype(weight.dtype)
            rows = x.reshape(-1, x.shape[-1]).to(dtype)
            bias = None if bias is None else bias.to(dtype)
            product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(rows, packed, bias, "none", [], "")
            return product.view(*x.shape[:-1], -1).to(x.dtype)
        num_rows = x.numel() // x.shape[-1]
        dtype = compute_dtype(weight.dtype) if num_rows >= _UPCAST_ROWS else weight.dtype
        out = F.linear(x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))
        return out.to(x.dtype)

    def _pack(self, weight: torch.Tensor) -> torch.Tensor | None:
        """The packed copy of a weight, or None where there is no room for one. Weights are known by their address."""
        key = weight.data_ptr()
        if key not in self._packed:
            dtype = compute_dtype(weight.dtype)
            wanted = weight.numel() * dtype.itemsize
            if wanted > self._left_bytes or not torch.backends.mkldnn.is_available():
                self._say_once(wanted)
                self._packed[key] = None
            else:
                self._left_bytes -= wanted
                self._packed[key] = torch.ops.mkldnn._reorder_linear_weight(weight.to(dtype).contiguous())
        return self._packed[key]

    def _say_once(self, wanted: int) -> None:
        if None not in self._packed.values():
            logger.warning(
                "packed copies of the weights do not all fit the %.1f GiB set aside (the next wants %.3f GiB); "
                "the rest is multiplied unpacked",
                self._budget_bytes / 2**30,
                wanted / 2**30,
            )
