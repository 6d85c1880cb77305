"""Owns the contract of an all-gather of columns among the ranks of a set, and the one over a process group.

Each rank of a set computes some columns of a matrix, and all ranks need the whole matrix:

    rank 0:  [T, n0] --+
                       +--> [T, n0 + n1] on both
    rank 1:  [T, n1] --+

Who computes which columns is decided elsewhere. Shape suffixes: T rows, N columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist


class ColumnGather(Protocol):
    """One rank's end of the all-gather.

    Each `gather` is collective: every rank of the set makes the same calls in the same order.
    """

    @property
    def rank(self) -> int:
        """This rank's place in the set, from 0. Its columns come after those of lower ranks."""

    @property
    def size(self) -> int:
        """The number of ranks in the set."""

    def gather(self, own_TN: torch.Tensor, widths: Sequence[int]) -> torch.Tensor:
        """Return the columns of all ranks, side by side in the order of ranks.

        Args:
            own_TN: This rank's columns, on a CPU; a number's neighbours in its row lie beside it. T and the number type
                are the same on all ranks. Without rows nothing is exchanged.
            widths: The columns of each rank, the same list on all ranks. A rank may have none.

        Returns:
            The matrix [T, sum of widths]. It is the caller's.

        Raises:
            RuntimeError: Another rank does not take part within the timeout.
        """

    def take_waited_s(self) -> float:
        """Return the seconds that this rank waited for other ranks since the last call, as far as they are measured."""


class GroupColumnGather:
    """A `ColumnGather` over a process group with the backend gloo. What it waits is not measured."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group, self._rank, self._size = group, group.rank(), group.size()

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def size(self) -> int:
        return self._size

    def gather(self, own_TN: torch.Tensor, widths: Sequence[int]) -> torch.Tensor:
        rows, widest = len(own_TN), max(widths)
        assert own_TN.shape[1] == widths[self.rank], "a rank gives as many columns as it announces"
        if not rows:
            return own_TN.new_empty(0, sum(widths))
        # gloo gathers parts of one size only.
        sent_TN = own_TN.new_zeros(rows, widest)
        sent_TN[:, : own_TN.shape[1]] = own_TN
        found = [torch.empty_like(sent_TN) for _ in widths]
        self._group.allgather([found], [sent_TN]).wait()
        return torch.cat([part_TN[:, :width] for part_TN, width in zip(found, widths, strict=True)], 1)

    def take_waited_s(self) -> float:
        return 0.0
