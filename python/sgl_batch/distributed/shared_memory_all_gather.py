"""Owns an all-gather of a few numbers through memory that the ranks of one machine share."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType

import torch

from sgl_batch.distributed.shared_memory import spin_us

ALL_GATHER_BYTES = 1 << 20
"""Bytes of each rank's region."""


class SharedMemoryAllGather:
    """One rank's end of an all-gather through all ranks' `regions`.

    Every rank takes part in every `gather`, in the same order.
    """

    def __init__(self, regions: list[torch.Tensor], rank: int, kernels: ModuleType, *, timeout_s: float) -> None:
        self._regions, self._rank, self._kernels, self._timeout_s = regions, rank, kernels, timeout_s
        self._spin_us = spin_us(len(regions))
        self._waited_s = 0.0

    def gather(self, values: Sequence[int]) -> list[list[int]]:
        """The values (16 at most, as many on every rank) of all ranks, by rank.

        Raises RuntimeError, which names the rank, where one does not take part within `timeout_s`.
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
        """Seconds waited for other ranks since this was last asked."""
        waited, self._waited_s = self._waited_s, 0.0
        return waited
