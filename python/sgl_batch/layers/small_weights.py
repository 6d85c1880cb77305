"""Owns the memory of the smaller forms of weights: of int8, in which each output has its own scale, and of 4 bits.

packed_weights decides which weights take which form; the native kernels make it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType

import torch

from sgl_batch.checkpoint.quantised import INTEGER_BITS, MXFP4_BITS, FourBits
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


@dataclass(frozen=True, slots=True)
class FourBitForm:
    """A form of 4 bits of matrices [B, N, K] of bfloat16, for those whose numbers it gives exactly.

    Attributes:
        bits: How many neighbours of a row share a scale.
        dtype: The number type of the tensors that hold it.
    """

    bits: FourBits
    dtype: torch.dtype

    def room(self, shape: torch.Size) -> torch.Tensor:
        """Return a tensor [B, N, any] for matrices [B, N, K]."""
        room = torch.empty(*shape[:-1], self.bits.num_bytes(shape[-1]) // self.dtype.itemsize, dtype=self.dtype)
        prefer_huge_pages(room)
        return room

    def pack(self, kernels: ModuleType, matrices: torch.Tensor, room: torch.Tensor) -> bool:
        """Fill `room`; return False if the numbers have no such form."""
        pack: Callable[..., bool] = kernels.pack_fp4_ if self is MXFP4 else kernels.pack_int4_
        return pack(matrices, room)

    def unpack(self, kernels: ModuleType, packed: torch.Tensor, inputs: int) -> torch.Tensor:
        """Return the matrices [B, N, inputs]."""
        plain: torch.Tensor = kernels.unpack_fp4(packed) if self is MXFP4 else kernels.unpack_int4(packed, inputs)
        return plain


MXFP4 = FourBitForm(MXFP4_BITS, torch.uint8)
FOUR_BIT_FORMS = (MXFP4, *(FourBitForm(bits, torch.int32) for bits in INTEGER_BITS))
"""In the order in which they are tried: the smallest first."""


def from_int8(rounded_BNK: torch.Tensor, scales_BN: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the weights [B, N, K] that rounded weights stand for."""
    weights = torch.empty(rounded_BNK.shape, dtype=dtype)
    for index, rounded_NK in enumerate(rounded_BNK):
        weights[index] = rounded_NK.float() * scales_BN[index][:, None]
    return weights
