"""Owns an all-gather of a few numbers through memory that the ranks of one machine share."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType

import torch

from sgl_batch.distributed.shared_memory import spin_us

ALL_GATHER_BYTES = 1 << 20
"""Bytes of each rank's region."""


class SharedMemoryAllGather:
    """One rank's end of an all-gather through the `regions` of all ranks.

    Every rank calls every `gather`, in the same order.
    """

    def __init__(self, regions: list[torch.Tensor], rank: int, kernels: ModuleType, *, timeout_s: float) -> None:
        self._regions, self._rank, self._kernels, self._timeout_s = regions, rank, kernels, timeout_s
        self._spin_us = spin_us(len(regions))
        self._waited_s = 0.0

    def gather(self, values: Sequence[int]) -> list[list[int]]:
        """Return the values of all ranks, by rank. Each rank gives equally many values, 16 at most.

        Raises RuntimeError, which names a rank that does not call this within `timeout_s`.
        """
        rows, waited_s = self._kernels.gather(
            self._regions,
            self._rank,
            torch.tensor(values, dtype=torch.int64),
            spin_us=self._spin_us,
            timeout_s=self._timeout_s,
        )
        self._waited_s += waited_s
        found: list[list[int]] = rows.tolist()
        return found

    def take_waited_s(self) -> float:
        """Return the seconds waited for other ranks since the last call of this."""
        waited, self._waited_s = self._waited_s, 0.0
        return waited
