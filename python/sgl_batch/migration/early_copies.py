"""Owns the copies of pages that prepare moves: they run while the ranks decode. Nothing here says who owns a sequence.

A boundary's decision names the copies, the same on all ranks. The target reserves room and says which it takes; the
source then sends their pages:

    source                                target
    reads the pages                       reserves room
                 <--- Taken ----          receives
                 ==== KV ======>          holds the copies, until their sequences move or it drops them

A copy that fails, or that no sequence follows, is dropped. The protocol of moves (`protocol`) has its own offer for
each sequence, and its own proof of one owner: a copy only saves it bytes.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec
import torch

from sgl_batch.core.early_copies import EarlyCopy, HeldCopy
from sgl_batch.distributed.channel import Channel
from sgl_batch.distributed.rank_errors import PeerLost, PeerTimeout, RankError
from sgl_batch.distributed.transport import Transfer, Transport


class Taken(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Target to source: there is room for these of the copies of a boundary, in their order; send them."""

    boundary: int
    sequence_ids: list[str]


class CopiedPages(Protocol):
    """The pages of one rank, as copies use them. One thread makes all calls."""

    def read(self, copy: EarlyCopy) -> Sequence[torch.Tensor]:
        """Return views of the first `full_pages` of a sequence of this rank, by layer, part and page.

        They may be read until the copy ends, also after the sequence has ended and its pages have others' KV: the
        copy is worth nothing then.
        """

    def keep(self, copy: EarlyCopy) -> Sequence[torch.Tensor] | None:
        """Reserve room for a sequence, and return views of pages to receive into; None where there is no room."""

    def drop(self, sequence_id: str) -> None:
        """Free what `keep` has reserved. No transfer writes to the pages any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Outgoing:
    """Copies to one rank that wait for its answer: their tensors by sequence."""

    boundary: int
    tensors: dict[str, Sequence[torch.Tensor]]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Incoming:
    """Copies from one rank that are under way."""

    sequence_ids: tuple[str, ...]
    transfer: Transfer


class EarlyCopies:
    """The copies of one rank. The caller calls `advance` between steps, which never waits."""

    def __init__(self, channel: Channel[Taken], transport: Transport, pages: CopiedPages) -> None:
        self._channel, self._transport, self._pages = channel, transport, pages
        self._boundary = -1
        self._offered: dict[int, _Outgoing] = {}
        self._sending: list[tuple[int, Transfer]] = []
        self._incoming: dict[int, _Incoming] = {}
        self._arrived: dict[str, int] = {}

    @property
    def held(self) -> list[HeldCopy]:
        """What this rank holds of sequences of other ranks."""
        under_way = [(name, source) for source, one in self._incoming.items() for name in one.sequence_ids]
        return [
            *(HeldCopy(sequence_id=name, source=source, arrived=True) for name, source in self._arrived.items()),
            *(HeldCopy(sequence_id=name, source=source, arrived=False) for name, source in under_way),
        ]

    @property
    def is_idle(self) -> bool:
        """Whether this rank holds no copy and none is under way."""
        return not (self._offered or self._sending or self._incoming or self._arrived)

    def begin(self, copies: Sequence[EarlyCopy]) -> None:
        """Begin this rank's part of the copies of a boundary. Every rank calls this with the same copies.

        None is under way to this rank.
        """
        self._boundary += 1
        rank = self._channel.rank
        for target in dict.fromkeys(copy.target for copy in copies if copy.source == rank):
            own = [copy for copy in copies if (copy.source, copy.target) == (rank, target)]
            tensors = {copy.sequence_id: self._pages.read(copy) for copy in own}
            self._offered[target] = _Outgoing(boundary=self._boundary, tensors=tensors)
        for source in dict.fromkeys(copy.source for copy in copies if copy.target == rank):
            self._take(source, [copy for copy in copies if (copy.source, copy.target) == (source, rank)])

    def _take(self, source: int, copies: Sequence[EarlyCopy]) -> None:
        kept = {copy.sequence_id: self._pages.keep(copy) for copy in copies}
        taken = {name: tensors for name, tensors in kept.items() if tensors is not None}
        try:
            self._channel.send(source, Taken(boundary=self._boundary, sequence_ids=list(taken)))
            if taken:
                into = [tensor for tensors in taken.values() for tensor in tensors]
                transfer = self._transport.recv(into, source, self._boundary)
                self._incoming[source] = _Incoming(sequence_ids=tuple(taken), transfer=transfer)
        except RankError:
            for name in taken:
                self._pages.drop(name)

    def advance(self) -> None:
        """Process the answers and the ends of transfers that are there. The agreement of the ranks finds dead ones."""
        if self._offered:
            self._receive()
        self._sending = [(peer, transfer) for peer, transfer in self._sending if not transfer.done]
        for source, one in list(self._incoming.items()):
            if one.transfer.done:
                del self._incoming[source]
                self._end(source, one)

    def _receive(self) -> None:
        while self._offered:
            try:
                received = self._channel.recv(list(self._offered), timeout_s=0, awaiting="which copies it takes")
            except PeerTimeout:
                return
            except PeerLost as lost:
                self.peer_died(lost.rank)
                continue
            if received is not None:
                self._send(*received)

    def _send(self, target: int, answer: Taken) -> None:
        offered = self._offered.get(target)
        if offered is None or offered.boundary != answer.boundary:
            return  # a late answer about copies that were given up
        del self._offered[target]
        tensors = [tensor for name in answer.sequence_ids for tensor in offered.tensors[name]]
        if tensors:
            self._sending.append((target, self._transport.send(tensors, target, answer.boundary)))

    def _end(self, source: int, incoming: _Incoming) -> None:
        try:
            incoming.transfer.wait(0)
        except RankError:
            for name in incoming.sequence_ids:
                self._pages.drop(name)
            return
        self._arrived |= dict.fromkeys(incoming.sequence_ids, source)

    def drop_all_but(self, moving: Collection[str]) -> None:
        """Drop the copies that have arrived, except those of sequences that move now, which are theirs from now on."""
        for name in self._arrived:
            if name not in moving:
                self._pages.drop(name)
        self._arrived = {}

    def peer_died(self, rank: int | None) -> None:
        """Give up the copies from and to a rank that is gone."""
        if rank is None:
            return
        self._offered.pop(rank, None)
        for peer, transfer in self._sending:
            if peer == rank:
                transfer.abandon()
        self._sending = [(peer, transfer) for peer, transfer in self._sending if peer != rank]
        incoming = self._incoming.pop(rank, None)
        lost = [name for name, source in self._arrived.items() if source == rank]
        if incoming is not None:
            incoming.transfer.abandon()
            lost += incoming.sequence_ids
        for name in lost:
            self._arrived.pop(name, None)
            self._pages.drop(name)
