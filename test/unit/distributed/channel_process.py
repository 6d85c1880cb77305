"""A rank in a process of its own, which sends one message and then waits to be killed."""

from __future__ import annotations

import multiprocessing
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

import msgspec

from sgl_batch.distributed.zmq_channel import ZmqChannel


class Number(msgspec.Struct, tag="number"):
    value: int


def _live_until_killed(link: Connection) -> None:
    with (
        tempfile.TemporaryDirectory() as directory,
        ZmqChannel[Number](rank=1, messages=Number, run_id="run", path=Path(directory) / "1") as channel,
    ):
        link.send(channel.endpoint)
        channel.connect({0: link.recv()})
        channel.send(0, Number(value=1))
        channel.recv([0], timeout_s=60, awaiting="its end")


@contextmanager
def other_process(endpoint: str) -> Iterator[tuple[BaseProcess, str]]:
    """Rank 1, connected to rank 0 at `endpoint`, and its own endpoint."""
    context = multiprocessing.get_context("forkserver")
    ours, theirs = context.Pipe()
    process = context.Process(target=_live_until_killed, args=(theirs,))
    process.start()
    theirs.close()
    try:
        its_endpoint = ours.recv()
        ours.send(endpoint)
        yield process, its_endpoint
    finally:
        process.kill()
        process.join()
        ours.close()
