"""A rank that listens for the others' beats in a process of its own, whose parent stands in for the controller."""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path

from sgl_batch.core.topology import Topology
from sgl_batch.distributed.rank_context import RankContext
from sgl_batch.managers.rank_heartbeat import RankHeartbeat


def _listen(directory: Path, num_ranks: int, timeout_s: float) -> None:
    RankHeartbeat(RankContext(rank=0, topology=Topology.uniform(num_ranks), directory=directory), timeout_s).start()
    threading.Event().wait()


def _control(directory: Path, num_ranks: int, timeout_s: float) -> None:
    rank = multiprocessing.get_context("fork").Process(target=_listen, args=(directory, num_ranks, timeout_s))
    rank.start()
    rank.join()


@contextmanager
def listening_rank(directory: Path, *, num_ranks: int, timeout_s: float) -> Iterator[BaseProcess]:
    """Yield the controller of rank 0, which connects to the others through `directory`."""
    controller = multiprocessing.get_context("spawn").Process(target=_control, args=(directory, num_ranks, timeout_s))
    controller.start()
    try:
        yield controller
    finally:
        controller.kill()
        controller.join()
