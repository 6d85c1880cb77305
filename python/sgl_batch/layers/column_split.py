"""Owns how the ranks of a set share the products of a pass whose rows all of them have (BatchGen 4.2, partition).

A product is split by its outputs: a rank computes some columns, and an all-gather brings all columns to all ranks. No
sum is split, so that the results have the bits of one rank. A packed weight is panels of columns: a rank's share of it
is some of the panels, where they lie. Shape suffixes: T rows, N columns.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import pairwise

import torch

from sgl_batch.distributed.column_gather import ColumnGather
from sgl_batch.metrics.counters import Counters

# What a product must read for an all-gather to cost less than it saves (benchmark/shared_products.py: with one row, two
# cores of a Zen 4 take 30 us for 512 KiB whole or shared, 13 and 17 us for 128 KiB, 174 and 121 us for 4 MiB).
LEAST_BYTES = 512 << 10


@cache
def shares(columns: int, ranks: int, unit: int) -> tuple[int, ...]:
    """Return where each rank's columns begin, and the end of the last: whole units but at the end, as even as can be.

    The first columns go to rank 0.
    """
    units = -(-columns // unit)
    return tuple(min(columns, units * rank // ranks * unit) for rank in range(ranks + 1))


class ColumnSplit:
    """One rank's share of each product, with the all-gather that brings the shares together.

    Every rank of the set calls the same methods in the same order, with the same rows.

    Args:
        gather: This rank's end of the all-gather.
        counters: Counts gathers, and the time that they waited as `stall`.
        least_bytes: The bytes that a product reads from which on it is split.
    """

    def __init__(self, gather: ColumnGather, counters: Counters, *, least_bytes: int = LEAST_BYTES) -> None:
        self._gather, self.counters, self._least_bytes = gather, counters, least_bytes

    @property
    def rank(self) -> int:
        """This rank's place in the set."""
        return self._gather.rank

    @property
    def size(self) -> int:
        """The number of ranks in the set."""
        return self._gather.size

    def pays(self, num_bytes: int, units: int) -> bool:
        """Return whether to split a product that reads `num_bytes` and has so many units of columns to share out."""
        return units >= self.size and num_bytes >= self._least_bytes

    def shares(self, columns: int, unit: int) -> tuple[int, ...]:
        """Return where the columns of each rank begin, and the end of the last (`shares`)."""
        return shares(columns, self.size, unit)

    def own(self, columns: int, unit: int = 1) -> tuple[int, int]:
        """Return this rank's columns [first, last) of so many."""
        ends = shares(columns, self.size, unit)
        return ends[self.rank], ends[self.rank + 1]

    def columns(self, num: int, unit: int, product: Callable[[int, int], torch.Tensor]) -> torch.Tensor:
        """Return a product [T, num] of which each rank computes a share: `product(first, last)`, [T, last - first]."""
        ends = shares(num, self.size, unit)
        own_TN = product(ends[self.rank], ends[self.rank + 1])
        return self._gathered(own_TN, [last - first for first, last in pairwise(ends)])

    def of_each(self, own_TN: torch.Tensor) -> torch.Tensor:
        """Return the matrices of all ranks [T, ranks, N]."""
        rows, width = own_TN.shape
        return self._gathered(own_TN, [width] * self.size).view(rows, self.size, width)

    def of_first(self, own_TN: torch.Tensor | None, shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
        """Return the matrix that rank 0 gives; the others give None. It has this shape and number type."""
        rows, width = shape
        given_TN = torch.empty(rows, 0, dtype=dtype) if own_TN is None else own_TN
        assert (own_TN is not None) == (self.rank == 0), "the first rank of a set gives the matrix"
        return self._gathered(given_TN, [width] + [0] * (self.size - 1))

    def _gathered(self, own_TN: torch.Tensor, widths: list[int]) -> torch.Tensor:
        out_TN = self._gather.gather(own_TN, widths)
        self.counters.add("column_gathers")
        self.counters.add("gathered_bytes", out_TN.nbytes)
        self.counters.clock.waited(self._gather.take_waited_s())
        return out_TN


class PassSplit:
    """The split of the pass in progress: one object that the layer runner sets and that products and attention read."""

    __slots__ = ("current",)

    def __init__(self) -> None:
        self.current: ColumnSplit | None = None
