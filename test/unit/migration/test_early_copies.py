"""Copies that prepare moves: they arrive between steps, and whatever fails leaves no page behind and moves nothing."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from typing import Any

import msgspec
import pytest
import torch
from memory_wires import MemoryTransport, complete

from sgl_batch.core.early_copies import EarlyCopy, HeldCopy
from sgl_batch.distributed.rank_errors import PeerLost, PeerTimeout, TransferError
from sgl_batch.migration.early_copies import EarlyCopies, Taken


class Channel:
    """A channel whose messages wait in `queues` by (from, to) until they are received."""

    def __init__(self, rank: int, queues: dict[tuple[int, int], deque[bytes]], dead: set[int]) -> None:
        self.rank, self._queues, self._dead = rank, queues, dead

    def send(self, peer: int, message: Taken) -> None:
        if peer in self._dead:
            raise PeerLost(peer, awaiting="a message", seconds=0)
        self._queues.setdefault((self.rank, peer), deque()).append(msgspec.msgpack.encode(message))

    def recv(self, peers: Collection[int], *, timeout_s: float, awaiting: str) -> tuple[int, Taken] | None:
        assert timeout_s == 0, "nothing may wait between two steps"
        for peer in peers:
            if queue := self._queues.get((peer, self.rank)):
                return peer, msgspec.msgpack.decode(queue.popleft(), type=Taken)
            if peer in self._dead:
                raise PeerLost(peer, awaiting=awaiting, seconds=0)
        raise PeerTimeout(peers, awaiting=awaiting, seconds=0)

    def wake(self) -> None:
        """Nobody waits."""


class Pages:
    """One tensor for each page. `room`: for how many pages copies may be kept."""

    def __init__(self, room: int = 100) -> None:
        self.room = room
        self.kept: dict[str, list[torch.Tensor]] = {}

    def read(self, copy: EarlyCopy) -> list[torch.Tensor]:
        return [torch.full((4,), float(page)) for page in range(1, copy.full_pages + 1)]

    def keep(self, copy: EarlyCopy) -> list[torch.Tensor] | None:
        if copy.pages > self.room:
            return None
        self.room -= copy.pages
        self.kept[copy.sequence_id] = [torch.zeros(4) for _ in range(copy.full_pages)]
        return self.kept[copy.sequence_id]

    def drop(self, sequence_id: str) -> None:
        self.room += len(self.kept.pop(sequence_id))


class TwoRanks:
    """Rank 0 copies to rank 1. `pages`, `copies` and `transports` are by rank."""

    def __init__(self, room: int = 100) -> None:
        queues: dict[tuple[int, int], deque[bytes]] = {}
        self.dead: set[int] = set()
        self.pages = [Pages(), Pages(room)]
        self.transports = [MemoryTransport(), MemoryTransport()]
        self.copies = [
            EarlyCopies(Channel(rank, queues, self.dead), transport, pages)
            for rank, (transport, pages) in enumerate(zip(self.transports, self.pages, strict=True))
        ]

    def begin(self, **full_pages: int) -> None:
        wanted = [
            EarlyCopy(sequence_id=name, source=0, target=1, full_pages=number, pages=number, gap=0)
            for name, number in full_pages.items()
        ]
        for one in self.copies:
            one.begin(wanted)

    def advance(self) -> None:
        for one in self.copies:
            one.advance()

    def halves(self, boundary: int = 0) -> tuple[Any, Any]:
        return self.transports[0].sends[1, boundary], self.transports[1].recvs[0, boundary]


def held(name: str, *, arrived: bool) -> HeldCopy:
    return HeldCopy(sequence_id=name, source=0, arrived=arrived)


def test_pages_arrive_between_steps_and_are_held_until_their_sequences_move():
    ranks = TwoRanks()
    ranks.begin(a=2, b=1)
    assert ranks.copies[1].held == [held("a", arrived=False), held("b", arrived=False)]
    ranks.advance()
    complete(*ranks.halves())
    ranks.advance()
    assert ranks.copies[1].held == [held("a", arrived=True), held("b", arrived=True)]
    assert [page.tolist() for page in ranks.pages[1].kept["a"]] == [[1.0] * 4, [2.0] * 4]
    ranks.copies[1].drop_all_but(["a"])
    assert list(ranks.pages[1].kept) == ["a"], "the mover's pages are its own now"
    assert all(one.is_idle for one in ranks.copies)


def test_a_copy_without_room_is_not_sent():
    ranks = TwoRanks(room=2)
    ranks.begin(a=3, b=2)
    ranks.advance()
    assert [held.sequence_id for held in ranks.copies[1].held] == ["b"]
    assert len(ranks.halves()[0].tensors) == 2
    complete(*ranks.halves())
    ranks.advance()
    assert ranks.copies[1].held == [held("b", arrived=True)]


def test_where_none_fits_no_transfer_begins():
    ranks = TwoRanks(room=0)
    ranks.begin(a=3)
    ranks.advance()
    assert ranks.transports[0].sends == {}
    assert all(one.is_idle for one in ranks.copies)


def test_a_copy_that_is_under_way_is_not_dropped():
    ranks = TwoRanks()
    ranks.begin(a=2)
    ranks.copies[1].drop_all_but(())
    assert ranks.copies[1].held == [held("a", arrived=False)]
    assert "a" in ranks.pages[1].kept


def test_a_transfer_that_fails_leaves_no_page_behind():
    ranks = TwoRanks()
    ranks.begin(a=2)
    ranks.advance()
    for half in ranks.halves():
        half.end(TransferError(0, "the connection is closed"))
    ranks.advance()
    assert all(one.is_idle for one in ranks.copies)
    assert (ranks.pages[1].kept, ranks.pages[1].room) == ({}, 100)


@pytest.mark.parametrize("arrived", [False, True])
def test_the_target_drops_what_it_holds_of_a_rank_that_died(arrived: bool):
    ranks = TwoRanks()
    ranks.begin(a=2)
    ranks.advance()
    if arrived:
        complete(*ranks.halves())
        ranks.advance()
    ranks.copies[1].peer_died(0)
    assert ranks.halves()[1].abandoned is not arrived, "no thread writes to the pages any more"
    assert ranks.pages[1].kept == {}
    assert ranks.copies[1].is_idle


def test_the_source_gives_up_copies_to_a_rank_that_died_before_it_answered():
    ranks = TwoRanks(room=0)
    ranks.dead.add(1)
    ranks.copies[0].begin([EarlyCopy(sequence_id="a", source=0, target=1, full_pages=2, pages=2, gap=0)])
    ranks.copies[0].advance()
    assert ranks.copies[0].is_idle


def test_a_target_that_cannot_answer_keeps_nothing():
    ranks = TwoRanks()
    ranks.dead.add(0)
    ranks.copies[1].begin([EarlyCopy(sequence_id="a", source=0, target=1, full_pages=2, pages=2, gap=0)])
    assert ranks.pages[1].kept == {}
    assert ranks.copies[1].is_idle


def test_a_later_copy_does_not_take_an_earlier_answer_for_its_own():
    ranks = TwoRanks(room=2)
    ranks.copies[1].begin([EarlyCopy(sequence_id="a", source=0, target=1, full_pages=2, pages=2, gap=0)])
    ranks.copies[0].begin([])  # this rank gave the first boundary's copies up
    ranks.begin(b=2)
    ranks.advance()
    assert list(ranks.transports[0].sends) == []
