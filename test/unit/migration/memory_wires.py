"""A channel and a transport in one process; the test decides every delivery."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

import msgspec
import torch

from sgl_batch.distributed.rank_errors import PeerLost, PeerTimeout, TransferError
from sgl_batch.distributed.transport import ignore
from sgl_batch.migration.messages import Message


class MemoryChannel:
    """The messages that one rank has sent, encoded and decoded as on the wire, in queues that the test empties."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.queues: dict[int, deque[Message]] = {}
        self.dead: set[int] = set()
        self.deaf: set[int] = set()
        self.wakes = 0

    def send(self, peer: int, message: Message) -> None:
        if peer in self.dead:
            raise PeerLost(peer, awaiting="it to take in a message", seconds=0)
        if peer in self.deaf:
            raise PeerTimeout([peer], awaiting="it to take in a message", seconds=0)
        copy = msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=Message)
        self.queues.setdefault(peer, deque()).append(copy)

    def recv(self, peers: Collection[int], *, timeout_s: float, awaiting: str) -> tuple[int, Message] | None:
        raise AssertionError("the test delivers messages itself")

    def wake(self) -> None:
        self.wakes += 1


@dataclass(slots=True, eq=False)
class MemoryTransfer:
    """One half of a transfer; the test ends it."""

    tensors: Sequence[torch.Tensor]
    peer: int
    on_done: Callable[[], None] = ignore
    done: bool = False
    abandoned: bool = False
    error: TransferError | None = None
    moved_bytes: int = field(default=0)

    def wait(self, timeout_s: float) -> None:
        if not self.done:
            raise PeerTimeout([self.peer], awaiting="tensors", seconds=timeout_s)
        if self.error is not None:
            raise self.error

    def abandon(self) -> None:
        self.abandoned = True

    def end(self, error: TransferError | None = None) -> None:
        self.done, self.error = True, error
        self.on_done()


class MemoryTransport:
    """Halves of transfers by (peer, tag); `complete` joins two halves."""

    def __init__(self) -> None:
        self.sends: dict[tuple[int, int], MemoryTransfer] = {}
        self.recvs: dict[tuple[int, int], MemoryTransfer] = {}

    def send(
        self, tensors: Sequence[torch.Tensor], peer: int, tag: int, on_done: Callable[[], None] = ignore
    ) -> MemoryTransfer:
        self.sends[peer, tag] = MemoryTransfer(tensors, peer, on_done)
        return self.sends[peer, tag]

    def recv(
        self, into: Sequence[torch.Tensor], peer: int, tag: int, on_done: Callable[[], None] = ignore
    ) -> MemoryTransfer:
        self.recvs[peer, tag] = MemoryTransfer(into, peer, on_done)
        return self.recvs[peer, tag]


def complete(source: MemoryTransfer, target: MemoryTransfer) -> None:
    """End both halves. The tensors arrive, unless a half was abandoned."""
    if not target.abandoned and not source.abandoned:
        for sent, received in zip(source.tensors, target.tensors, strict=True):
            received.copy_(sent)
    source.end()
    target.end()
