"""Owns rows sent from rank to rank over a control channel (headers) and a transport (data). It knows no experts.

It uses gloo. NCCL has no message tags, and would need a group for each direction of a pair.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection
from dataclasses import dataclass

import msgspec
import torch

from sgl_batch.distributed.channel import Channel
from sgl_batch.distributed.transport import Transfer, Transport
from sgl_batch.layers.moe.token_dispatcher.base import ROW_DTYPES
from sgl_batch.layers.moe.token_dispatcher.point_to_point import Rows

MOST_IN_FLIGHT = 16
"""The most sends to one rank that have not ended (AsyncMoE; gLLM)."""
# A full peer accepts messages whenever it waits. The heartbeat finds a peer that hangs long before this timeout.
_TIMEOUT_S = 1800.0


class RowsHeader(msgspec.Struct, tag="rows", array_like=True, frozen=True):
    """The form of a message's tensors, for the receiver. `number`: counts the messages from one rank to another."""

    number: int
    layer: int
    num_rows: int
    hidden_size: int
    top_k: int
    dtype: int


@dataclass(frozen=True, slots=True)
class _Incoming:
    source: int
    rows: Rows
    transfer: Transfer


class RowMailbox:
    """A `PointToPoint` (see point_to_point.py). `peers`: the other ranks, which have both a channel and a transport."""

    def __init__(self, channel: Channel[RowsHeader], transport: Transport, peers: Collection[int]) -> None:
        self._channel, self._transport, self._peers = channel, transport, peers
        self._num_sent: Counter[int] = Counter()
        self._num_posted: Counter[int] = Counter()
        self._outgoing: dict[int, list[Transfer]] = defaultdict(list)
        self._incoming: list[_Incoming] = []

    def send(self, target: int, rows: Rows) -> _Sending:
        """See `PointToPoint`."""
        assert len(rows.x_RM), "a message has rows"
        self._until(lambda: self._num_in_flight(target) < MOST_IN_FLIGHT, _TIMEOUT_S, f"sends to rank {target} to end")
        number = self._num_sent[target]
        self._num_sent[target] += 1
        num_rows, hidden_size = rows.x_RM.shape
        header = RowsHeader(
            number, rows.layer, num_rows, hidden_size, rows.ids_RK.shape[1], ROW_DTYPES.index(rows.x_RM.dtype)
        )
        self._channel.send(target, header)
        transfer = self._transport.send(_tensors(rows), target, number, self._channel.wake)
        self._outgoing[target].append(transfer)
        return _Sending(self, transfer)

    def receive(self, timeout_s: float) -> tuple[int, Rows]:
        """See `PointToPoint`."""
        self._until(lambda: self._first_whole() is not None, timeout_s, "rows")
        item = self._first_whole()
        assert item is not None, "a whole message was waited for"
        self._incoming.remove(item)
        item.transfer.wait(0.0)
        return item.source, item.rows

    def wait_for(self, transfer: Transfer, timeout_s: float) -> None:
        """Return when a transfer of this rank has ended; receive messages meanwhile."""
        self._until(lambda: transfer.done, timeout_s, "a send to end")
        transfer.wait(0.0)

    def _num_in_flight(self, target: int) -> int:
        for transfer in self._outgoing[target]:
            if transfer.done:
                transfer.wait(0.0)  # raises what it failed with
        self._outgoing[target] = [transfer for transfer in self._outgoing[target] if not transfer.done]
        return len(self._outgoing[target])

    def _first_whole(self) -> _Incoming | None:
        """Return the first message that is complete and has no incomplete message of its source before it."""
        waiting: set[int] = set()
        for item in self._incoming:
            if item.source not in waiting and item.transfer.done:
                return item
            waiting.add(item.source)
        return None

    def _until(self, holds: Callable[[], bool], timeout_s: float, awaiting: str) -> None:
        """Receive headers and allocate their tensors until `holds`. The end of a transfer wakes the channel."""
        deadline = time.monotonic() + timeout_s
        while not holds():
            left_s = max(0.0, deadline - time.monotonic())
            received = self._channel.recv(self._peers, timeout_s=left_s, awaiting=awaiting)
            if received is not None:
                self._post_receive(*received)

    def _post_receive(self, source: int, header: RowsHeader) -> None:
        assert header.number == self._num_posted[source], f"rank {source} sent message {header.number} out of its order"
        self._num_posted[source] += 1
        rows = Rows(
            layer=header.layer,
            x_RM=torch.empty(header.num_rows, header.hidden_size, dtype=ROW_DTYPES[header.dtype]),
            ids_RK=torch.empty(header.num_rows, header.top_k, dtype=torch.int32),
            weights_RK=torch.empty(header.num_rows, header.top_k),
        )
        transfer = self._transport.recv(_tensors(rows), source, header.number, self._channel.wake)
        self._incoming.append(_Incoming(source, rows, transfer))


@dataclass(frozen=True, slots=True)
class _Sending:
    """A send of a mailbox (see `SendHandle`)."""

    _mailbox: RowMailbox
    _transfer: Transfer

    @property
    def done(self) -> bool:
        return self._transfer.done

    def wait(self, timeout_s: float) -> None:
        self._mailbox.wait_for(self._transfer, timeout_s)


def _tensors(rows: Rows) -> list[torch.Tensor]:
    return [rows.x_RM, rows.ids_RK, rows.weights_RK]
