"""A rank that listens for the others' beats in a process of its own, below one that stands for the controller."""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path

from sgl_batch.distributed.rank_place import RankPlace
from sgl_batch.managers.rank_heartbeat import RankHeartbeat


def _listen(directory: Path, world_size: int, timeout_s: float) -> None:
    RankHeartbeat(RankPlace(rank=0, world_size=world_size, directory=directory), timeout_s).start()
    threading.Event().wait()


def _control(directory: Path, world_size: int, timeout_s: float) -> None:
    rank = multiprocessing.get_context("fork").Process(target=_listen, args=(directory, world_size, timeout_s))
    rank.start()
    rank.join()


@contextmanager
def listening_rank(directory: Path, *, world_size: int, timeout_s: float) -> Iterator[BaseProcess]:
    """The controller of rank 0, which meets the others in `directory`."""
    controller = multiprocessing.get_context("spawn").Process(target=_control, args=(directory, world_size, timeout_s))
    controller.start()
    try:
        yield controller
    finally:
        controller.kill()
        controller.join()
