"""Owns memory that holds the same in all ranks of a machine once: they write it together, and then keep it apart.

    empty   every rank allocates the same tensors in the same order, so that each lies at the same place for all
    write   what one rank writes, all have; they agree who writes what (`takes`), and wait for each other (`barrier`)
    seal    from here on a write takes a copy of its page for this rank alone, and none changes what another reads

The memory has no name and ends with the processes that map it, however they end. Ranks whose cores lie at different
memory (NUMA nodes) do not share: each would read the weights of another node at every step.
"""

from __future__ import annotations

import logging
import mmap
import os
from collections.abc import Sequence

import torch
import torch.distributed as dist

from sgl_batch.distributed.rank_cores import read_cpus
from sgl_batch.distributed.shared_memory import gathered
from sgl_batch.memory.page_advice import HUGE_PAGE_BYTES, advise
from sgl_batch.memory.page_mapping import fault_in, fill_with_huge_page, map_file, map_own, reserved, written_ranges

logger = logging.getLogger(__name__)

_ALIGNMENT = 64
_COPY_BYTES = 64 << 20
# The unit of stat's st_blocks.
_BLOCK_BYTES = 512
_CLOSED = -1


class SharedArena:
    """One rank's end. `shared_arena` makes it.

    Args:
        group: all ranks of the engine, also those that share other memory.
        sharers: the ranks in it that share this memory.
        memory: whole huge pages [bytes], under which the file lies.
        descriptor: of the file, which the arena closes.
    """

    def __init__(self, group: dist.ProcessGroup, sharers: Sequence[int], memory: torch.Tensor, descriptor: int) -> None:
        self._group, self._sharers, self._memory, self._descriptor = group, sharers, memory, descriptor
        self._next = 0
        self._dealt = [0] * len(sharers)

    @property
    def num_sharers(self) -> int:
        """How many ranks share this memory."""
        return len(self._sharers)

    @property
    def index(self) -> int:
        """This rank's number among them."""
        return self._sharers.index(self._group.rank())

    @property
    def num_bytes(self) -> int:
        """The memory that it takes, once for all of them."""
        return os.fstat(self._descriptor).st_blocks * _BLOCK_BYTES

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor in it that holds anything. The room for all tensors is what the arena was made for."""
        num_bytes = torch.Size(shape).numel() * dtype.itemsize
        first, self._next = self._next, self._next + padded(num_bytes)
        assert self._next <= len(self._memory), f"{self._next} of {len(self._memory)} bytes"
        for start in range(-(-first // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES, self._next, HUGE_PAGE_BYTES):
            if start // HUGE_PAGE_BYTES % self.num_sharers == self.index:
                fill_with_huge_page(self._memory[start : start + HUGE_PAGE_BYTES])
        return self._memory[first : first + num_bytes].view(dtype).view(*shape)

    def __contains__(self, tensor: torch.Tensor) -> bool:
        return 0 <= tensor.data_ptr() - self._memory.data_ptr() < len(self._memory)

    def takes(self, amount: int) -> bool:
        """Return whether this rank does the next piece of work: the one that has least does. All ask in one order."""
        least = self._dealt.index(min(self._dealt))
        self._dealt[least] += amount
        return least == self.index

    def release(self, tensor: torch.Tensor) -> None:
        """Give back the whole pages of a tensor that no rank needs any more, before `seal`."""
        advise(tensor, mmap.MADV_REMOVE)

    def barrier(self) -> None:
        """Wait until every rank of the engine has come here, and see what it has written before."""
        dist.barrier(self._group)

    def seal(self) -> None:
        """End the time of writing together. Every rank of the engine calls it."""
        self.barrier()
        map_file(self._memory, self._descriptor, shared=False)
        for first, last in written_ranges(self._descriptor):
            fault_in(self._memory[first:last])

    def make_own(self) -> None:
        """Give this rank a copy of all that is in it, at the same addresses, to write much to it.

        The shared memory is given back when the last of the ranks has done so.
        """
        written = list(written_ranges(self._descriptor))
        for begin in range(0, len(self._memory), _COPY_BYTES):
            part = self._memory[begin : begin + _COPY_BYTES]
            found = [(max(first - begin, 0), min(last - begin, len(part))) for first, last in written]
            copies = [(first, part[first:last].clone()) for first, last in found if first < last]
            map_own(part)
            for first, copy in copies:
                part[first : first + len(copy)] = copy
        os.close(self._descriptor)
        self._descriptor = _CLOSED


def padded(num_bytes: int) -> int:
    """Return the room that a tensor of so many bytes takes in an arena."""
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def shared_arena(group: dist.ProcessGroup, num_bytes: int) -> SharedArena | None:
    """Make an arena for the ranks of `group` whose cores lie at the same memory as this one's.

    All ranks get None if no two of them are at the same memory, or if one of them cannot map it. Every rank of `group`
    calls this, with the same number of bytes. The group must be on one machine and have the backend gloo. An arena
    takes memory only where it is written.
    """
    memory, opened = reserved(num_bytes), _CLOSED
    made = os.memfd_create("sgl-batch-weights")
    os.ftruncate(made, len(memory))
    rows = gathered(group, [_nodes(), num_bytes, os.getpid(), made])
    assert all(row[1] == num_bytes for row in rows), f"the ranks have other weights: {rows}"
    sharers = [rank for rank, row in enumerate(rows) if row[0] == rows[group.rank()][0]]
    _, _, pid, number = rows[sharers[0]]
    try:
        opened = os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR | os.O_CLOEXEC)
        map_file(memory, opened, shared=True)
        is_mapped = True
    except OSError as error:
        is_mapped = False
        logger.warning("each rank holds all weights, because memory cannot be shared between ranks: %s", error)
    are_mapped = gathered(group, [int(is_mapped)])  # a rank closes its file after all ranks have opened it
    os.close(made)
    if len({row[0] for row in rows}) < len(rows) and all(mapped for (mapped,) in are_mapped):
        return SharedArena(group, sharers, memory, opened)
    if opened != _CLOSED:
        os.close(opened)
    return None


def _nodes() -> int:
    """Return a number that stands for the NUMA nodes of this process's cores."""
    return sum(1 << node % 62 for node in {cpu.node for cpu in read_cpus(os.sched_getaffinity(0))})
