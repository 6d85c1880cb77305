"""Owns memory that the ranks of one machine share: each rank has a region that it alone writes and all can read."""

from __future__ import annotations

import mmap
import os

import torch
import torch.distributed as dist

from sgl_batch.errors import EngineError

# In a wait that is shorter than this, spinning is faster than sleeping and being woken.
_SPIN_US = 200.0
_SPIN_US_ON_A_SHARED_CORE = 5.0


def shared_regions(group: dist.ProcessGroup, num_bytes: int) -> list[torch.Tensor]:
    """Make this rank's region and map all ranks' regions; return them by rank: uint8 [num_bytes], zero at first.

    A region takes memory only where it is written. Every rank of `group` calls this. The group must be on one machine
    and have the backend gloo. The regions end with the processes that hold them. Raises EngineError where memory cannot
    be shared.
    """
    own = os.memfd_create("sgl-batch-rank")
    try:
        os.ftruncate(own, num_bytes)
        descriptors = gathered(group, [os.getpid(), own])
        regions = [_mapped(f"/proc/{pid}/fd/{number}", num_bytes) for pid, number in descriptors]
        dist.barrier(group)  # a rank closes its descriptor after all ranks have opened it
    finally:
        os.close(own)
    return regions


def gathered(group: dist.ProcessGroup, values: list[int]) -> list[list[int]]:
    """Gather the values of every rank of `group`; return them by rank."""
    rows = [torch.empty(len(values), dtype=torch.int64) for _ in range(group.size())]
    dist.all_gather(rows, torch.tensor(values), group=group)
    return [row.tolist() for row in rows]


def _mapped(path: str, num_bytes: int) -> torch.Tensor:
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            memory = mmap.mmap(descriptor, num_bytes)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise EngineError(
            f"the ranks cannot share {num_bytes >> 20} MiB of address space through {path} ({error}); lift the limit "
            "on virtual memory, or choose --token-dispatcher gloo"
        ) from error
    return torch.frombuffer(memory, dtype=torch.uint8)


def spin_us(world_size: int) -> float:
    """Return how long, in us, a rank spins for another's values before it sleeps; short where ranks share cores."""
    enough = (os.cpu_count() or 1) >= world_size
    return _SPIN_US if enough else _SPIN_US_ON_A_SHARED_CORE
