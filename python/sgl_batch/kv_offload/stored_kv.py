"""Owns the KV of a rank's sequences in the store: which blocks each has, and the copies between these and its pages.

In an inclusive store every page of KV lies from the moment it is full, so that whoever is suspended copies no more than
its open page; in an exclusive one lies nothing that is on the device. Who is suspended and restored is decided in
core/residency.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from sgl_batch.kv_offload.copy_engine import CopyEngine, Ticket
from sgl_batch.kv_offload.host_kv_store import HostKVStore
from sgl_batch.metrics.counters import Counters
from sgl_batch.sglang_adapter.host_copies import Download

_RATE_COPIES = 3


@dataclass(slots=True, kw_only=True)
class _Record:
    """A sequence's blocks, page after page. `open`: whether the last of them is of a page that is not full.

    `tokens`: how many have their KV in the blocks, where the sequence waits.
    """

    blocks: list[int] = field(default_factory=list)
    open: bool = False
    tokens: int = 0


@dataclass(slots=True, kw_only=True)
class _Copy:
    """Pages on their way to blocks of a sequence, or of one that has ended meanwhile."""

    ticket: Ticket
    blocks: torch.Tensor
    owners: list[str]


@dataclass(slots=True, kw_only=True)
class _Unsent:
    """Pages whose numbers are on their way to the host, which can give the copy engine none before."""

    pages: Download
    blocks: torch.Tensor
    owners: list[str]


class StoredKV:
    """Blocks by sequence. Copies to the store run in the background; `sync` completes those that have ended.

    Until its sequence is suspended or ends, a page that is written through is not given back: its copy may begin late.
    """

    def __init__(
        self,
        store: HostKVStore,
        engine: CopyEngine,
        *,
        page_size: int,
        layers: int,
        share: int,
        counters: Counters,
        exclusive: bool = False,
    ) -> None:
        """`share`: how many blocks this rank may hold."""
        self._store, self._engine, self._page_size, self._share = store, engine, page_size, share
        self.exclusive = exclusive
        self._layers, self._counters = range(layers), counters
        self._records: dict[str, _Record] = {}
        self._copies: list[_Copy] = []
        self._unsent: list[_Unsent] = []
        self._pending_free: list[int] = []
        self._new: list[int] = []
        self._replaced: dict[str, int] = {}

    def take(self, pages: int) -> torch.Tensor:
        """Blocks to write to. That there are enough was settled at admission.

        It counts no blocks of ended sequences to which copies are under way: they would be taken from others' shares.
        """
        if self._pending_free and self.held + pages > self._share:
            self.sync(wait=True)
        blocks = self._store.prepare_store(pages)
        assert blocks is not None, f"{pages} blocks were reserved, {self._store.counts().free} are free"
        return blocks

    @property
    def free(self) -> int:
        """Blocks of this rank's share that it does not hold."""
        return self._share - self.held

    @property
    def held(self) -> int:
        """Blocks that this rank holds, those that several sequences share once for each."""
        return len(self._pending_free) + sum(len(record.blocks) for record in self._records.values())

    def adopt(self, name: str, blocks: torch.Tensor, tokens: int, *, shared: Sequence[int] = ()) -> None:
        """A sequence's prompt of `tokens` is in READY blocks: `shared` ones of others first, then these, its own."""
        self._store.share(shared)
        whole = [*shared, *blocks.tolist()]
        self._records[name] = _Record(blocks=whole, open=tokens % self._page_size != 0, tokens=tokens)

    def extend(self, name: str, blocks: torch.Tensor, tokens: int) -> None:
        """A prompt of which whole pages are here goes on in these READY blocks; `tokens` of it are here then."""
        record = self._records[name]
        record.blocks += blocks.tolist()
        record.open, record.tokens = tokens % self._page_size != 0, tokens

    def __contains__(self, name: str) -> bool:
        return name in self._records

    def fork(self, leader: str, follower: str, *, tokens: int) -> None:
        """Let a sequence begin with the first `tokens` of another's prompt, in the same blocks."""
        blocks = self._records[leader].blocks[: -(-tokens // self._page_size)]
        self._store.share(blocks)
        self._records[follower] = _Record(blocks=list(blocks), open=tokens % self._page_size != 0, tokens=tokens)

    def store_blocks_of(self, name: str) -> list[int]:
        """Where the KV of a sequence that waits lies, page after page."""
        return list(self._records[name].blocks)

    def take_over(self, name: str, blocks: list[int], tokens: int) -> None:
        """A sequence of another rank, which holds these READY blocks until this has returned, is to go on here."""
        self._store.share(blocks)
        self.adopt(name, torch.tensor(blocks, dtype=torch.int64), tokens)

    def write_through(self, names: list[str], pages: torch.Tensor) -> None:
        """Pages [N] on the device that have just become full, one of each sequence, leave for the store.

        Their copy begins with the first call of `send_known` or `sync` that finds their numbers on the host.
        """
        blocks = self.take(len(names))
        for name, block in zip(names, blocks.tolist(), strict=True):
            self._records[name].blocks.append(block)
        self._unsent.append(_Unsent(pages=Download(pages), blocks=blocks, owners=names))
        self._counters.add("pages_written_through", len(names))
        self.send_known()

    def send_known(self, *, wait: bool = False) -> None:
        """Begin the copies of pages written through whose numbers the host knows by now; of all if `wait`."""
        while self._unsent and (wait or self._unsent[0].pages.done):
            unsent = self._unsent.pop(0)
            self._send(unsent.owners, unsent.pages.wait(), unsent.blocks)

    # Decode KV that is streamed: whoever runs has all pages in the store, of which the last is written again and again.

    def grow(self, names: list[str]) -> None:
        """A block more for each of these sequences, to which the coming pass writes first."""
        if not names:
            return
        blocks = self.take(len(names)).tolist()
        for name, block in zip(names, blocks, strict=True):
            self._records[name].blocks.append(block)
        self._new += blocks

    def own_open_pages(self, names: list[str]) -> None:
        """Sequences begin to run: an open page that others have in the same block is written to a block of its own."""
        opened = [name for name in names if self._records[name].open]
        held = self._store.references([self._records[name].blocks[-1] for name in opened]).tolist()
        shared = [name for name, references in zip(opened, held, strict=True) if references > 1]
        for name in shared:
            self._replaced[name] = self._records[name].blocks.pop()
        self.grow(shared)

    def is_replaced(self, name: str) -> bool:
        """Whether the coming pass reads a sequence's open page in a block that is not its own."""
        return name in self._replaced

    def open_block_to_read(self, name: str) -> int:
        """The block that has the tokens so far of a sequence's open page."""
        return self._replaced.get(name, self._records[name].blocks[-1])

    def written(self) -> None:
        """A pass is over, and all copies of it: what it wrote first is READY."""
        if self._new:
            self._store.complete_store(self._new)
            self._new = []
        if self._replaced:
            self._store.free(list(self._replaced.values()))
            self._replaced = {}

    def tokens_of(self, name: str) -> int:
        """How many tokens of a sequence that waits have their KV in the store."""
        return self._records[name].tokens

    def suspend(self, names: list[str], pages: list[torch.Tensor], tokens: list[int]) -> None:
        """Everything of these sequences is in the store when this returns; what is not there yet is copied.

        `pages`: those of each on the device, in its order. `tokens`: how many have KV.
        """
        owners: list[str] = []
        missing = []
        for name, own, number in zip(names, pages, tokens, strict=True):
            record = self._records.setdefault(name, _Record())
            record.tokens, record.open = number, number % self._page_size != 0
            missing.append(own[len(record.blocks) :])
            owners += [name] * len(missing[-1])
        if owners:
            blocks = self.take(len(owners))
            for name, block in zip(owners, blocks.tolist(), strict=True):
                self._records[name].blocks.append(block)
            self._send(owners, torch.cat(missing), blocks)
        self._counters.add("pages_copied_to_suspend", len(owners))
        self.sync(wait=True)

    def _send(self, owners: list[str], pages: torch.Tensor, blocks: torch.Tensor) -> None:
        ticket = self._engine.store_pages(self._layers, pages, blocks)
        self._copies.append(_Copy(ticket=ticket, blocks=blocks, owners=owners))

    def restore(self, name: str, pages: torch.Tensor, *, there: Sequence[bool] = ()) -> Ticket:
        """Copy a sequence's KV to device pages, in its order; call `restored` when the ticket is done.

        `there`: of its first pages, whether the device has them already.
        """
        blocks = torch.tensor(self._records[name].blocks, dtype=torch.int64)
        assert len(blocks) == len(pages), f"{name} has {len(blocks)} pages in the store, {len(pages)} on the device"
        lacking = torch.ones(len(blocks), dtype=torch.bool)
        lacking[: len(there)] = ~torch.tensor(there, dtype=torch.bool)
        self._counters.add("pages_restored", int(lacking.sum()))
        return self._engine.load_pages(self._layers, blocks[lacking], pages[lacking])

    def restored(self, name: str) -> None:
        """A sequence's KV is on the device; its open page will be another one when it is full."""
        record = self._records[name]
        if self.exclusive:
            self._store.free(record.blocks)
            record.blocks, record.open = [], False
        elif record.open:
            self._store.free([record.blocks.pop()])
            record.open = False

    def forget(self, name: str) -> None:
        """A sequence has ended. Its blocks are free as soon as no copy to them is under way."""
        record = self._records.pop(name, None)
        if record is not None:
            self._pending_free += record.blocks
            self._release_idle()

    def _release_idle(self) -> None:
        written_to = [copy.blocks for copy in self._copies] + [unsent.blocks for unsent in self._unsent]
        busy = {block for blocks in written_to for block in blocks.tolist()}
        free = [block for block in self._pending_free if block not in busy]
        if free:
            self._store.free(free)
            self._pending_free = [block for block in self._pending_free if block in busy]

    def copy_rate(self, pages: torch.Tensor) -> float:
        """Bytes a second that come back to these device pages [P], the fastest of a few copies. Raises CopyError.

        The pages are in no other use, and are as before when this returns; as many blocks are free.
        """
        blocks, took = self.take(len(pages)), []
        try:
            self._engine.store_pages(self._layers, pages, blocks).wait()
            self._store.complete_store(blocks)
            for _ in range(_RATE_COPIES):
                begun = time.perf_counter()
                self._engine.load_pages(self._layers, blocks, pages).wait()
                took.append(time.perf_counter() - begun)
        finally:
            self._store.free(blocks)
        return len(pages) * self._store.geometry.block_bytes / min(took)

    def sync(self, *, wait: bool) -> None:
        """Complete the copies that have ended, of all if `wait`. Raises CopyError where one failed."""
        began = time.perf_counter()
        self.send_known(wait=wait)
        left = []
        for copy in self._copies:
            if wait or copy.ticket.done:
                copy.ticket.wait()
                self._store.complete_store(copy.blocks)
            else:
                left.append(copy)
        self._copies = left
        self._release_idle()
        if wait:
            self._counters.add("store_wait_us", round(1e6 * (time.perf_counter() - began)))
