"""The small operators between a pass's large ones, which a record can have, typed. They have the bits of torch's own.

Rows are the first dimension of what has most dimensions.
"""

from __future__ import annotations

import torch

_ops = torch.ops.sgl_batch_kernel


def copy_rows(x: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """A contiguous copy, in another number type if one is given."""
    copy: torch.Tensor = _ops.copy_rows(x, dtype)
    return copy


def put_rows_(to: torch.Tensor, x: torch.Tensor) -> None:
    """Copy x to a tensor of its shape, which may be a part of wider rows, in that one's number type."""
    _ops.put_rows_(to, x)


def add_rows(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a + b, of which one may be smaller, as torch broadcasts it."""
    total: torch.Tensor = _ops.add_rows(a, b)
    return total


def mul_rows(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a * b likewise."""
    product: torch.Tensor = _ops.mul_rows(a, b)
    return product


def scale_rows(x: torch.Tensor, factor: float) -> torch.Tensor:
    """x * factor, in x's number type."""
    product: torch.Tensor = _ops.scale_rows(x, factor)
    return product


def sigmoid_rows(x: torch.Tensor) -> torch.Tensor:
    """1 / (1 + exp(-x)), of floats."""
    shares: torch.Tensor = _ops.sigmoid_rows(x)
    return shares
