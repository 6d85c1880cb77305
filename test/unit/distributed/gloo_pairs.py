"""Gloo groups between threads of this process, and a rank in a process of its own that dies in a transfer."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.process import BaseProcess

import torch
import torch.distributed as dist

from sgl_batch.distributed.group_transport import CHUNK_BYTES, GroupTransport


def gloo_groups(num_ranks: int) -> list[dist.ProcessGroup]:
    """One group with all its ranks in this process."""
    store = dist.HashStore()

    def join(rank: int) -> dist.ProcessGroup:
        return dist.ProcessGroupGloo(store, rank, num_ranks, timedelta(seconds=60))

    with ThreadPoolExecutor(num_ranks) as pool:
        return list(pool.map(join, range(num_ranks)))


def transports(num_ranks: int) -> list[GroupTransport]:
    """One transport for each rank of a new group."""
    return [GroupTransport(group, range(num_ranks)) for group in gloo_groups(num_ranks)]


def _join_of_two(store_path: str, rank: int) -> dist.ProcessGroup:
    """Join the other process, and wait until it has joined: if it died before, joining would fail, not a transfer."""
    store = dist.FileStore(store_path, 2)
    group = dist.ProcessGroupGloo(store, rank, 2, timedelta(seconds=60))
    store.set(f"{rank} has joined", "")
    store.wait([f"{1 - rank} has joined"], timedelta(seconds=60))
    return group


def _die_while_sending(store_path: str, num_chunks: int) -> None:
    group = _join_of_two(store_path, 1)
    chunk = torch.ones(CHUNK_BYTES, dtype=torch.uint8)
    for _ in range(num_chunks):
        group.send([chunk], 0, 5).wait()
    os.kill(os.getpid(), signal.SIGKILL)


@contextmanager
def peer_that_dies_after(store_path: str, num_chunks: int) -> Iterator[tuple[GroupTransport, BaseProcess]]:
    """Rank 0's transport to a process that sends `num_chunks` chunks with tag 5 and then kills itself."""
    process = multiprocessing.get_context("forkserver").Process(
        target=_die_while_sending, args=(store_path, num_chunks)
    )
    process.start()
    try:
        yield GroupTransport(_join_of_two(store_path, 0), range(2)), process
    finally:
        process.kill()
        process.join()


def both(first: Callable[[], object], second: Callable[[], object]) -> None:
    """Run both at once, and raise what either raises."""
    with ThreadPoolExecutor(2) as pool:
        for future in [pool.submit(first), pool.submit(second)]:
            future.result(60)
