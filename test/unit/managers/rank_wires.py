"""Channels between ranks that are threads of one process: in memory, or over sockets as between processes."""

from __future__ import annotations

import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TypeVar

import msgspec

from sgl_batch.distributed.rank_errors import PeerLost, PeerTimeout
from sgl_batch.distributed.zmq_channel import ZmqChannel
from sgl_batch.managers.rank_messages import Message

T = TypeVar("T")


class MemoryWires:
    """The messages between all ranks that were sent and not yet received, and the ranks that have died."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.queues: dict[tuple[int, int], deque[bytes]] = {}
        self.dead: set[int] = set()

    def kill(self, rank: int) -> None:
        with self.changed:
            self.dead.add(rank)
            self.changed.notify_all()


class MemoryChannel:
    """A `Channel` over MemoryWires. Messages are encoded and decoded as on the wire."""

    def __init__(self, rank: int, wires: MemoryWires) -> None:
        self.rank, self._wires = rank, wires
        self._woken = False

    def send(self, peer: int, message: Message) -> None:
        with self._wires.changed:
            if peer in self._wires.dead:
                raise PeerLost(peer, awaiting=f"it to take in {type(message).__name__}", seconds=0)
            self._wires.queues.setdefault((self.rank, peer), deque()).append(msgspec.msgpack.encode(message))
            self._wires.changed.notify_all()

    def recv(self, peers: Collection[int], *, timeout_s: float, awaiting: str) -> tuple[int, Message] | None:
        deadline = time.monotonic() + timeout_s
        with self._wires.changed:
            while True:
                for peer in sorted(peers):
                    queue = self._wires.queues.get((peer, self.rank))
                    if queue:
                        return peer, msgspec.msgpack.decode(queue.popleft(), type=Message)
                for peer in sorted(self._wires.dead & set(peers)):
                    raise PeerLost(peer, awaiting=awaiting, seconds=0)
                if self._woken:
                    self._woken = False
                    return None
                if not self._wires.changed.wait(deadline - time.monotonic()):
                    raise PeerTimeout(peers, awaiting=awaiting, seconds=timeout_s)

    def wake(self) -> None:
        with self._wires.changed:
            self._woken = True
            self._wires.changed.notify_all()

    def close(self) -> None:
        """Close the channel: peers see PeerLost."""
        self._wires.kill(self.rank)


@contextmanager
def in_memory(num_ranks: int) -> Iterator[list[MemoryChannel]]:
    """Channels of all ranks, without sockets."""
    wires = MemoryWires()
    yield [MemoryChannel(rank, wires) for rank in range(num_ranks)]


@contextmanager
def over_sockets(num_ranks: int) -> Iterator[list[ZmqChannel[Message]]]:
    """Channels of all ranks as the engine has them."""
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        channels: list[ZmqChannel[Message]] = [
            stack.enter_context(ZmqChannel(rank=rank, messages=Message, run_id="run", path=directory / str(rank)))
            for rank in range(num_ranks)
        ]
        endpoints = {channel.rank: channel.endpoint for channel in channels}
        for channel in channels:
            channel.connect(endpoints)
        yield channels


def all_at_once(calls: Sequence[Callable[[], T]]) -> list[T]:
    """Make each call in a thread of its own, as ranks do; return the results, or raise the first failure."""
    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result() for future in [pool.submit(call) for call in calls]]
