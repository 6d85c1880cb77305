"""A rank in a process of its own, which kills itself as soon as ranks keep apart what it has written for all."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.process import BaseProcess

import torch
import torch.distributed as dist

from sgl_batch.distributed.shared_arena import SharedArena, padded, shared_arena

NUMBERS = 1 << 20


def joined(store: str, rank: int) -> tuple[SharedArena, torch.Tensor]:
    """Return this rank's end of an arena of two ranks, and a tensor in it."""
    group = dist.ProcessGroupGloo(dist.FileStore(store, 2), rank, 2, timedelta(seconds=60))
    arena = shared_arena(group, padded(4 * NUMBERS))
    assert arena is not None, "the other rank shares memory"
    return arena, arena.empty((NUMBERS,), torch.int32)


def _write_and_die(store: str) -> None:
    arena, tensor = joined(store, 0)
    tensor.fill_(3)
    arena.seal()
    os.kill(os.getpid(), signal.SIGKILL)


@contextmanager
def rank_that_writes_and_dies(store: str) -> Iterator[BaseProcess]:
    """Rank 0 in a process that fills the tensor with 3."""
    process = multiprocessing.get_context("forkserver").Process(target=_write_and_die, args=(store,))
    process.start()
    try:
        yield process
    finally:
        process.kill()
        process.join()
