"""Owns the memory of the int8 form of weights, in which each output has its own scale, and the way back from it.

packed_weights decides which weights take that form; the native kernels round them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from sgl_batch.memory.huge_pages import prefer_huge_pages

MakeTensor = Callable[[Sequence[int], torch.dtype], torch.Tensor]
"""Takes a shape and a dtype, and returns a tensor that holds anything."""


def new_tensor(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype)


def int8_room(shape: torch.Size, make: MakeTensor = new_tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tensors, made by `make`, for the int8 form of weights [B, N, K] and for its scales [B, N]."""
    rounded, scales = make(shape, torch.int8), make(shape[:2], torch.float32)
    prefer_huge_pages(rounded)
    return rounded, scales


def from_int8(rounded_BNK: torch.Tensor, scales_BN: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the weights [B, N, K] that rounded weights stand for."""
    weights = torch.empty(rounded_BNK.shape, dtype=dtype)
    for index, rounded_NK in enumerate(rounded_BNK):
        weights[index] = rounded_NK.float() * scales_BN[index][:, None]
    return weights
