"""Wires between virtual ranks, which are threads of this process. A seed decides when headers and data arrive."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from message_exchange import SOON_S

from sgl_batch.distributed.rank_errors import PeerTimeout, TransferError
from sgl_batch.distributed.transport import ignore
from sgl_batch.layers.moe.token_dispatcher.row_mailbox import RowMailbox

T = TypeVar("T")
Pair = tuple[int, int]


@dataclass(eq=False)
class Half:
    """A send or a receive of one message."""

    tensors: Sequence[torch.Tensor]
    on_done: Callable[[], None] = ignore
    moved_bytes: int = 0
    error: TransferError | None = None
    ended: threading.Event = field(default_factory=threading.Event)

    @property
    def done(self) -> bool:
        return self.ended.is_set()

    def wait(self, timeout_s: float) -> None:
        assert self.ended.wait(timeout_s)
        if self.error is not None:
            raise self.error

    def abandon(self) -> None:
        raise AssertionError("no transfer here is abandoned")

    def end(self) -> None:
        self.ended.set()
        self.on_done()


class Wires:
    """All messages between ranks. A thread delivers headers and data in a random order that the protocol allows."""

    def __init__(self, num_ranks: int, seed: int) -> None:
        self.changed = threading.Condition()
        self.headers: dict[Pair, deque[Any]] = {}
        self.inboxes: dict[int, deque[tuple[int, Any]]] = {rank: deque() for rank in range(num_ranks)}
        self.woken: set[int] = set()
        self.halves: dict[tuple[Pair, int], dict[str, Half]] = {}
        self.held: set[tuple[Pair, int]] = set()
        self.failing: set[tuple[Pair, int]] = set()
        self.in_flight: Counter[Pair] = Counter()
        self.most_in_flight = 0
        self._ends = False
        self._random = random.Random(seed)
        self._thread = threading.Thread(target=self._run)
        self.mailboxes = [
            RowMailbox(Wire(rank, self), Wire(rank, self), [peer for peer in range(num_ranks) if peer != rank])
            for rank in range(num_ranks)
        ]

    def __enter__(self) -> Wires:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        with self.changed:
            self._ends = True
            self.changed.notify_all()
        self._thread.join()

    def on_all(self, work: Callable[[int, RowMailbox], T]) -> list[T]:
        """Run the work of all ranks at once and return their results."""
        with ThreadPoolExecutor(len(self.mailboxes)) as pool:
            futures = [pool.submit(work, rank, mailbox) for rank, mailbox in enumerate(self.mailboxes)]
            return [future.result(3 * SOON_S) for future in futures]

    def release(self, pair: Pair, number: int) -> None:
        """Let this message's data arrive."""
        with self.changed:
            self.held.discard((pair, number))
            self.changed.notify_all()

    def _arrivals(self) -> list[Callable[[], None]]:
        def header(pair: Pair) -> Callable[[], None]:
            return lambda: self.inboxes[pair[1]].append((pair[0], self.headers[pair].popleft()))

        def data(key: tuple[Pair, int]) -> Callable[[], None]:
            return lambda: self._arrive(key)

        found = [header(pair) for pair, queue in self.headers.items() if queue]
        return found + [data(key) for key, both in self.halves.items() if len(both) == 2 and key not in self.held]

    def _arrive(self, key: tuple[Pair, int]) -> None:
        both = self.halves.pop(key)
        for sent, received in zip(both["send"].tensors, both["recv"].tensors, strict=True):
            received.copy_(sent)
        self.in_flight[key[0]] -= 1
        for half in both.values():
            half.error = TransferError(key[0][1], "the wire broke") if key in self.failing else None
            half.ended.set()
        self.woken |= set(key[0])

    def _run(self) -> None:
        with self.changed:
            while not self._ends:
                arrivals = self._arrivals()
                if arrivals:
                    self._random.choice(arrivals)()
                    self.changed.notify_all()
                    self.changed.wait(0)  # lets the ranks run
                else:
                    self.changed.wait()


class Wire:
    """One rank's channel and its transport."""

    def __init__(self, rank: int, wires: Wires) -> None:
        self.rank, self._wires = rank, wires

    def send(self, *arguments: Any) -> Any:
        """Send a header to a peer, or tensors with a tag."""
        if len(arguments) == 4:
            tensors, peer, tag, on_done = arguments
            return self._move("send", (self.rank, peer), tensors, tag, on_done)
        peer, message = arguments
        with self._wires.changed:
            self._wires.headers.setdefault((self.rank, peer), deque()).append(message)
            self._wires.changed.notify_all()
        return None

    def recv(self, *arguments: Any, timeout_s: float = 0.0, awaiting: str = "") -> Any:
        if len(arguments) == 4:
            into, peer, tag, on_done = arguments
            return self._move("recv", (peer, self.rank), into, tag, on_done)
        return self._next(arguments[0], timeout_s, awaiting)

    def _next(self, peers: Collection[int], timeout_s: float, awaiting: str) -> tuple[int, Any] | None:
        deadline = time.monotonic() + timeout_s
        wires = self._wires
        with wires.changed:
            while not wires.inboxes[self.rank]:
                if self.rank in wires.woken:
                    wires.woken.discard(self.rank)
                    return None
                if not wires.changed.wait(max(0.0, deadline - time.monotonic())):
                    raise PeerTimeout(peers, awaiting=awaiting, seconds=timeout_s)
            return wires.inboxes[self.rank].popleft()

    def wake(self) -> None:
        with self._wires.changed:
            self._wires.woken.add(self.rank)
            self._wires.changed.notify_all()

    def _move(self, way: str, pair: Pair, tensors: Sequence[torch.Tensor], tag: int, on_done: Any) -> Half:
        wires = self._wires
        with wires.changed:
            half = wires.halves.setdefault((pair, tag), {})[way] = Half(tensors, on_done)
            if way == "send":
                wires.in_flight[pair] += 1
                wires.most_in_flight = max(wires.most_in_flight, wires.in_flight[pair])
            wires.changed.notify_all()
        return half
