"""Owns the int8 form of weights: each output has its own scale, and its largest weight becomes 127.

packed_weights decides which weights take that form.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from sgl_batch.memory.huge_pages import prefer_huge_pages

_LARGEST = 127

MakeTensor = Callable[[Sequence[int], torch.dtype], torch.Tensor]
"""Takes a shape and a dtype, and returns a tensor that holds anything."""


def new_tensor(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype)


def int8_room(shape: torch.Size, make: MakeTensor = new_tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tensors, made by `make`, for the int8 form of weights [B, N, K] and for its scales [B, N]."""
    rounded, scales = make(shape, torch.int8), make(shape[:2], torch.float32)
    prefer_huge_pages(rounded)
    return rounded, scales


def to_int8(
    weight_BNK: torch.Tensor, room: tuple[torch.Tensor, torch.Tensor] | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return weights rounded to int8 [B, N, K], and the scales [B, N] in float32 by which outputs are multiplied.

    They are written to `room`, or to tensors of their own.
    """
    rounded, scales = room or int8_room(weight_BNK.shape)
    # One matrix after the other: a whole layer in float32 would be the memory peak of loading.
    for index, weight_NK in enumerate(weight_BNK):
        exact = weight_NK.float()
        scales[index] = exact.abs().amax(-1) / _LARGEST
        scales[index][scales[index] == 0] = 1.0
        rounded[index] = (exact / scales[index][:, None]).round_().clamp_(-_LARGEST, _LARGEST)
    return rounded, scales


def from_int8(rounded_BNK: torch.Tensor, scales_BN: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the weights [B, N, K] that rounded weights stand for."""
    weights = torch.empty(rounded_BNK.shape, dtype=dtype)
    for index, rounded_NK in enumerate(rounded_BNK):
        weights[index] = rounded_NK.float() * scales_BN[index][:, None]
    return weights
