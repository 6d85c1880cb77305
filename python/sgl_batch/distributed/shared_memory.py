"""Owns memory that the ranks of one machine share: a region each, which its rank alone writes; not what it holds."""

from __future__ import annotations

import mmap
import os

import torch
import torch.distributed as dist

from sgl_batch.errors import EngineError

# While a wait is as short as this, looking again is quicker than to sleep and be woken.
_SPIN_US = 200.0
_SPIN_US_ON_A_SHARED_CORE = 5.0


def shared_regions(group: dist.ProcessGroup, num_bytes: int) -> list[torch.Tensor]:
    """Every rank's region, by rank: uint8 [num_bytes], zero at first, and taking memory only where it is written.

    Every rank of `group`, which must be on one machine and have the backend gloo, calls this. The regions end with the
    processes that hold them. Raises EngineError where memory cannot be shared.
    """
    own = os.memfd_create("sgl-batch-rank")
    try:
        os.ftruncate(own, num_bytes)
        told = gathered(group, [os.getpid(), own])
        regions = [_mapped(f"/proc/{pid}/fd/{number}", num_bytes) for pid, number in told]
        dist.barrier(group)  # nobody closes what another has not opened yet
    finally:
        os.close(own)
    return regions


def gathered(group: dist.ProcessGroup, values: list[int]) -> list[list[int]]:
    """What every rank of `group` gave, by rank."""
    told = [torch.empty(len(values), dtype=torch.int64) for _ in range(group.size())]
    dist.all_gather(told, torch.tensor(values), group=group)
    return [row.tolist() for row in told]


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
    """How long a rank should look for another's word before it sleeps; short where ranks share cores."""
    enough = (os.cpu_count() or 1) >= world_size
    return _SPIN_US if enough else _SPIN_US_ON_A_SHARED_CORE
