"""Owns the memory of the smaller forms of weights: of int8, in which each output has its own scale, and of 4 bits.

packed_weights decides which weights take which form; the native kernels make it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from sgl_batch.checkpoint.tensors import fp4_bytes
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


def fp4_room(shape: torch.Size) -> torch.Tensor:
    """Return a tensor for the bytes of weights [B, N, K] of 4 bits, with a byte for 32 numbers [B, N, K * 17 / 32]."""
    room = torch.empty(*shape[:-1], fp4_bytes(shape[-1]), dtype=torch.uint8)
    prefer_huge_pages(room)
    return room


def from_int8(rounded_BNK: torch.Tensor, scales_BN: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the weights [B, N, K] that rounded weights stand for."""
    weights = torch.empty(rounded_BNK.shape, dtype=dtype)
    for index, rounded_NK in enumerate(rounded_BNK):
        weights[index] = rounded_NK.float() * scales_BN[index][:, None]
    return weights
