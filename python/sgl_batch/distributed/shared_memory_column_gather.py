"""Owns an all-gather of columns through memory that the ranks of one machine share.

A rank writes its columns to one of the two slots of its region, waits until all ranks have written theirs, and copies
them. Rounds take the slots in turns. A rank that begins a round has waited for all ranks in the round before, so that
every rank has read the slot by then.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType

import torch

from sgl_batch.distributed.shared_memory import spin_us

COLUMN_GATHER_BYTES = 64 << 20
"""Bytes of each rank's region. Larger matrices take several rounds."""
# The native kernels' part of a region (sgl-kernel/csrc/cpu/exchange.cpp).
_HEADER_BYTES = 8192
_ALIGNMENT = 64


class SharedMemoryColumnGather:
    """A `ColumnGather` through the `regions` of all ranks of the set, which nothing else may use.

    `timeout_s`: how long to wait for another rank.
    """

    def __init__(self, regions: list[torch.Tensor], rank: int, kernels: ModuleType, *, timeout_s: float) -> None:
        self._regions, self._rank, self._kernels, self._timeout_s = regions, rank, kernels, timeout_s
        self._slot_bytes = (len(regions[0]) - _HEADER_BYTES) // 2 // _ALIGNMENT * _ALIGNMENT
        self._round = 0
        self._spin_us = spin_us(len(regions))
        self._waited_s = 0.0

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def size(self) -> int:
        return len(self._regions)

    def gather(self, own_TN: torch.Tensor, widths: Sequence[int]) -> torch.Tensor:
        assert own_TN.shape[1] == widths[self.rank], "a rank gives as many columns as it announces"
        out_TN = own_TN.new_empty(len(own_TN), sum(widths))
        at_once = self._slot_bytes // (own_TN.itemsize * max(1, *widths))
        assert at_once, f"a row of {max(widths)} columns does not fit a region of {len(self._regions[0])} bytes"
        for first in range(0, len(own_TN), at_once):
            self._gather_rows(own_TN[first : first + at_once], widths, out_TN[first : first + at_once])
        return out_TN

    def take_waited_s(self) -> float:
        waited, self._waited_s = self._waited_s, 0.0
        return waited

    def _gather_rows(self, own_TN: torch.Tensor, widths: Sequence[int], out_TN: torch.Tensor) -> None:
        self._round += 1
        rows = len(own_TN)
        self._slot(self.rank, rows, widths[self.rank], own_TN.dtype).copy_(own_TN)
        self._await_all(rows, own_TN, widths)
        first = 0
        for peer, width in enumerate(widths):
            columns_TN = own_TN if peer == self.rank else self._slot(peer, rows, width, own_TN.dtype)
            out_TN[:, first : first + width] = columns_TN
            first += width

    def _slot(self, rank: int, rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a rank's slot of this round as [rows, width]."""
        begin = _HEADER_BYTES + self._round % 2 * self._slot_bytes
        return self._regions[rank][begin : begin + rows * width * dtype.itemsize].view(dtype).view(rows, width)

    def _await_all(self, rows: int, own_TN: torch.Tensor, widths: Sequence[int]) -> None:
        """Wait until every rank has written its slot. Raises ValueError, on all ranks, if their matrices differ."""
        described = [self._round, rows, own_TN.itemsize, *widths][:16]
        found, waited_s = self._kernels.gather(
            self._regions,
            self.rank,
            torch.tensor(described, dtype=torch.int64),
            spin_us=self._spin_us,
            timeout_s=self._timeout_s,
        )
        self._waited_s += waited_s
        for peer, theirs in enumerate(found.tolist()):
            if theirs != described:
                raise ValueError(
                    f"rank {peer} of the set gathers columns of (round, rows, bytes of a number, widths) {theirs}, and "
                    f"rank {self.rank} of {described}; all ranks must give the same"
                )
