"""Owns the functions that each rank runs for the tests of column gathers, in its own process."""

from __future__ import annotations

import torch
import torch.distributed as dist

from sgl_batch.distributed.column_gather import ColumnGather, GroupColumnGather
from sgl_batch.distributed.shared_memory import shared_regions
from sgl_batch.distributed.shared_memory_column_gather import SharedMemoryColumnGather
from sgl_batch.kernel_loader import native_kernels

REGION_BYTES = 1 << 20
DTYPES = (torch.bfloat16, torch.float32)
# Rows, and the columns of each rank by its place. The last take several rounds through small regions.
ROWS = (0, 1, 5, 600)


def widths_of(size: int, kind: str) -> list[int]:
    """Return the columns of each rank."""
    return {
        "even": [64] * size,
        "uneven": [32 * (rank + 1) for rank in range(size)],
        "of the first alone": [48] + [0] * (size - 1),
        "wide": [1000] * size,
        "single": [1] * size,
    }[kind]


KINDS = ("even", "uneven", "of the first alone", "wide", "single")


def matrix(rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.arange(rows * columns).view(rows, columns).remainder(251).sub(125).to(dtype)


def gather_of(group: dist.ProcessGroup, name: str) -> ColumnGather:
    if name == "gloo":
        return GroupColumnGather(group)
    kernels = native_kernels()
    assert kernels is not None, "the native kernels are installed where tests run"
    return SharedMemoryColumnGather(shared_regions(group, REGION_BYTES), group.rank(), kernels, timeout_s=20)


def gather_all(group: dist.ProcessGroup, name: str) -> list[str]:
    """Return the cases in which this rank got another matrix."""
    gather, wrong = gather_of(group, name), []
    assert (gather.rank, gather.size) == (group.rank(), group.size())
    for kind in KINDS:
        widths = widths_of(gather.size, kind)
        first = sum(widths[: gather.rank])
        for rows in ROWS:
            for dtype in DTYPES:
                whole = matrix(rows, sum(widths), dtype)
                # Rows of a slice lie apart.
                found = gather.gather(whole[:, first : first + widths[gather.rank]], widths)
                if not (found.dtype == dtype and torch.equal(found, whole)):
                    wrong.append(f"{kind}, {rows} rows of {dtype}")
    if gather.take_waited_s() < 0 or gather.take_waited_s() != 0:
        wrong.append("time waited")
    return wrong


def keep_what_was_gathered(group: dist.ProcessGroup, name: str) -> bool:
    """Return whether a gathered matrix stays as it is while others are gathered."""
    gather = gather_of(group, name)
    kept = [gather.gather(torch.full((3, 8), float(number)), [8] * gather.size) for number in range(6)]
    return all(bool((matrix == number).all()) for number, matrix in enumerate(kept))


def differ(group: dist.ProcessGroup, name: str) -> str:
    """Give another number of rows on the last rank; return the error."""
    gather = gather_of(group, name)
    rows = 3 if gather.rank == gather.size - 1 else 4
    try:
        gather.gather(torch.ones(rows, 8), [8] * gather.size)
    except ValueError as error:
        return str(error)
    return "no error"
