"""Owns an all-gather of columns through memory that the ranks of one machine share.

The native kernels do it. A rank writes its columns to one of the two slots of its region, waits until all ranks have
written theirs, and copies them. Rounds take the slots in turns.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType

import torch

from sgl_batch.distributed.shared_memory import spin_us


class SharedMemoryColumnGather:
    """A `ColumnGather` through the `regions` of all ranks of the set, which nothing else may use.

    It raises ValueError, on all ranks, if their rows or widths differ. `timeout_s`: how long to wait for another rank.
    """

    def __init__(self, regions: list[torch.Tensor], rank: int, kernels: ModuleType, *, timeout_s: float) -> None:
        self._regions, self._rank, self._kernels, self._timeout_s = regions, rank, kernels, timeout_s
        self._spin_us = spin_us(len(regions))
        self._waited_s = 0.0

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def size(self) -> int:
        return len(self._regions)

    def gather(self, own_TN: torch.Tensor, widths: Sequence[int]) -> torch.Tensor:
        out_TN, waited_s = self._kernels.gather_columns(
            self._regions, self._rank, own_TN, list(widths), spin_us=self._spin_us, timeout_s=self._timeout_s
        )
        self._waited_s += waited_s
        result: torch.Tensor = out_TN
        return result

    def take_waited_s(self) -> float:
        waited, self._waited_s = self._waited_s, 0.0
        return waited
