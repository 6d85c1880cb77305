"""Owns the form of a token as bytes, and the buffers of such rows. It does not know ranks.

Shape suffixes: R rows, B bytes of a row, M hidden, K experts per token.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

# Each part and each row can be read with the widest loads of a GPU, whatever M and K are.
_ALIGNMENT_BYTES = 16


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class RowFormat:
    """A row of [x | ids | weights]: M numbers of type `dtype`, K of int32, K of float32."""

    hidden_size: int
    top_k: int
    dtype: torch.dtype

    @property
    def ids_start(self) -> int:
        return _aligned(self.hidden_size * self.dtype.itemsize)

    @property
    def row_bytes(self) -> int:
        return _aligned(self.ids_start + 2 * self.top_k * torch.int32.itemsize)

    def parts(self, rows_RB: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return views of uint8 rows: x [R, M], ids [R, K] and weights [R, K]."""
        ids_start, ids_bytes = self.ids_start, self.top_k * torch.int32.itemsize
        x_RM = rows_RB[:, : self.hidden_size * self.dtype.itemsize].view(self.dtype)
        ids_RK = rows_RB[:, ids_start : ids_start + ids_bytes].view(torch.int32)
        weights_RK = rows_RB[:, ids_start + ids_bytes : ids_start + 2 * ids_bytes].view(torch.float32)
        return x_RM, ids_RK, weights_RK


class GrowingBuffer:
    """Memory for rows that is kept between uses, and replaced by larger memory when it is too small."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._memory = torch.empty(0, dtype=torch.uint8, device=device)

    def rows(self, num_rows: int, row_bytes: int) -> torch.Tensor:
        """Return contiguous uint8 [num_rows, row_bytes], undefined. Rows that were returned before are invalid."""
        num_bytes = num_rows * row_bytes
        if num_bytes > len(self._memory):
            size = max(num_bytes, len(self._memory) * 3 // 2)
            self._memory = torch.empty(size, dtype=torch.uint8, device=self._device)
        return self._memory[:num_bytes].view(num_rows, row_bytes)
