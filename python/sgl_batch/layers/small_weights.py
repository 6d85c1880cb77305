"""Owns the memory of the smaller forms of weights.

In int8 each output has its own scale. In grouped forms numbers have 4 or 8 bits, and neighbouring inputs share scales.
packed_weights decides which weights take which form; the native kernels make it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType

import torch

from sgl_batch.checkpoint.quantised import FP8_BITS, INT8_BITS, INTEGER_BITS, MXFP4_BITS, GroupedBits
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
class GroupedForm:
    """A form of 4 or 8 bits of matrices [B, N, K] of bfloat16, for those whose numbers it gives exactly.

    Attributes:
        bits: Of a number, and how many neighbours of a row share a scale.
        dtype: The number type of the tensors that hold it.
        operators: What the kernels' operators of this form are named after: `pack_NAME_` and `unpack_NAME`.
        tells_inputs: Whether the size of a packed tensor alone tells `unpack_NAME` how many inputs a row has.
    """

    bits: GroupedBits
    dtype: torch.dtype
    operators: str
    tells_inputs: bool = False

    def room(self, shape: Sequence[int], make: MakeTensor = new_tensor) -> torch.Tensor:
        """Return a tensor [B, N, any], made by `make`, for matrices [B, N, K]."""
        room = make((*shape[:-1], self.bits.num_bytes(shape[-1]) // self.dtype.itemsize), self.dtype)
        prefer_huge_pages(room)
        return room

    def pack(self, kernels: ModuleType, matrices: torch.Tensor, room: torch.Tensor) -> bool:
        """Fill `room`; return False if the numbers have no such form."""
        pack: Callable[..., bool] = getattr(kernels, f"pack_{self.operators}_")
        return pack(matrices, room)

    def unpack(self, kernels: ModuleType, packed: torch.Tensor, inputs: int) -> torch.Tensor:
        """Return the matrices [B, N, inputs]."""
        unpack: Callable[..., torch.Tensor] = getattr(kernels, f"unpack_{self.operators}")
        return unpack(packed) if self.tells_inputs else unpack(packed, inputs)


GROUPED_FORMS = (
    GroupedForm(MXFP4_BITS, torch.uint8, "fp4", tells_inputs=True),
    *(GroupedForm(bits, torch.int32, "int4") for bits in INTEGER_BITS),
    *(GroupedForm(bits, torch.float8_e4m3fn, "fp8") for bits in FP8_BITS),
    *(GroupedForm(bits, torch.int16, "int8_groups") for bits in INT8_BITS),
)
"""In the order in which they are tried: the smallest first."""


def most_grouped_bytes(count: int) -> int:
    """Return the bytes that so many numbers take in the largest of the grouped forms."""
    return max(form.bits.num_bytes(count) for form in GROUPED_FORMS)


def from_int8(rounded_BNK: torch.Tensor, scales_BN: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the weights [B, N, K] that rounded weights stand for."""
    weights = torch.empty(rounded_BNK.shape, dtype=dtype)
    for index, rounded_NK in enumerate(rounded_BNK):
        weights[index] = rounded_NK.float() * scales_BN[index][:, None]
    return weights
