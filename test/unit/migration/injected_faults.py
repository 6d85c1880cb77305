"""Wrappers of a rank's channel, transport and store: they delay calls at random, and end or stop the process."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Collection, Sequence

import torch
from page_store import PageStore

from sgl_batch.distributed.channel import Channel
from sgl_batch.distributed.group_transport import GroupTransport, chunks_of
from sgl_batch.distributed.transport import Transfer, ignore
from sgl_batch.migration.header import SequenceHeader
from sgl_batch.migration.messages import Message
from sgl_batch.migration.store import Refusal, Reservation

FIRST_CHUNK = "after the first chunk"


class Trap:
    """Sends this process `signal_number` when it reaches `point` for the first time."""

    def __init__(self, point: str | None, signal_number: int = signal.SIGKILL) -> None:
        self._point, self._signal = point, signal_number

    def set_for(self, point: str) -> bool:
        return point == self._point

    def at(self, point: str) -> None:
        if self.set_for(point):
            self._point = None
            os.kill(os.getpid(), self._signal)


class Delays:
    """Waits for up to `longest_s`, or not at all, by a seeded generator."""

    def __init__(self, seed: int, longest_s: float) -> None:
        self._random, self._longest_s = random.Random(seed), longest_s

    def pause(self) -> None:
        if self._longest_s and self._random.random() < 0.5:
            time.sleep(self._random.random() * self._longest_s)


class FaultyChannel:
    """A Channel that wraps another one."""

    def __init__(self, inner: Channel[Message], trap: Trap, delays: Delays) -> None:
        self._inner, self._trap, self._delays = inner, trap, delays
        self.rank = inner.rank

    def send(self, peer: int, message: Message) -> None:
        name = type(message).__name__
        self._trap.at(f"before sending {name}")
        self._delays.pause()
        self._inner.send(peer, message)
        self._trap.at(f"after sending {name}")

    def recv(self, peers: Collection[int], *, timeout_s: float, awaiting: str) -> tuple[int, Message] | None:
        received = self._inner.recv(peers, timeout_s=timeout_s, awaiting=awaiting)
        self._delays.pause()
        if received is not None:
            self._trap.at(f"on {type(received[1]).__name__}")
        return received

    def wake(self) -> None:
        self._inner.wake()


class FaultyTransport:
    """A Transport that wraps another one. It notes each transfer, and whether the one before had ended by then."""

    def __init__(self, inner: GroupTransport, trap: Trap, delays: Delays) -> None:
        self._inner, self._trap, self._delays = inner, trap, delays
        self.begun: list[tuple[str, bool]] = []
        self._last: Transfer | None = None

    def send(
        self, tensors: Sequence[torch.Tensor], peer: int, tag: int, on_done: Callable[[], None] = ignore
    ) -> Transfer:
        self._begin(self._inner.send, tensors, peer, tag)
        self._last = self._inner.send(tensors, peer, tag, on_done)
        return self._last

    def recv(self, into: Sequence[torch.Tensor], peer: int, tag: int, on_done: Callable[[], None] = ignore) -> Transfer:
        self._begin(self._inner.recv, into, peer, tag)
        self._last = self._inner.recv(into, peer, tag, on_done)
        return self._last

    def _begin(
        self,
        move: Callable[[Sequence[torch.Tensor], int, int], Transfer],
        tensors: Sequence[torch.Tensor],
        peer: int,
        tag: int,
    ) -> None:
        self.begun.append((move.__name__, self._last is None or self._last.done))
        self._delays.pause()
        if self._trap.set_for(FIRST_CHUNK):
            move([tensor for _, tensor in next(chunks_of(tensors))], peer, tag).wait(30)
            self._trap.at(FIRST_CHUNK)


class FaultyStore(PageStore):
    """A PageStore that springs a trap at its calls."""

    trap = Trap(None)

    def reserve(self, header: SequenceHeader) -> Reservation | Refusal:
        self.trap.at("before reserve")
        return super().reserve(header)

    def adopt(self, header: SequenceHeader, reservation: Reservation) -> None:
        self.trap.at("before adopt")
        super().adopt(header, reservation)
        self.trap.at("after adopt")

    def release(self, sequence_id: str) -> None:
        self.trap.at("before release")
        super().release(sequence_id)
        self.trap.at("after release")
