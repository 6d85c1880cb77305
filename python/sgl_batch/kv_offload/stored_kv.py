"""Owns the KV of a rank's sequences in the store: which blocks each has, and the copies between blocks and pages.

An inclusive store has every page from the moment it is full, so that a suspended sequence copies only its open page. An
exclusive store has nothing that is on the device. Which sequences are suspended and restored is decided in
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
class _StoredSequence:
    """One sequence's blocks, in the order of its pages. `open`: whether the last block's page is not full.

    `tokens`: how many tokens have their KV in the blocks while the sequence waits.
    """

    blocks: list[int] = field(default_factory=list)
    open: bool = False
    tokens: int = 0


@dataclass(slots=True, kw_only=True)
class _Copy:
    """A copy of pages to blocks of sequences, which may end before the copy does."""

    ticket: Ticket
    blocks: torch.Tensor
    owners: list[str]


@dataclass(slots=True, kw_only=True)
class _Unsent:
    """Pages to copy whose numbers are still being downloaded; the copy engine needs them on the host."""

    pages: Download
    blocks: torch.Tensor
    owners: list[str]


class StoredKV:
    """The blocks of each sequence, by name. Copies to the store run in the background; `sync` completes them.

    `leased`: how many blocks this rank may hold now.

    The caller keeps a page that is written through until its sequence is suspended or ends: the copy may begin late.
    """

    def __init__(
        self,
        store: HostKVStore,
        engine: CopyEngine,
        *,
        page_size: int,
        layers: int,
        leased: int,
        counters: Counters,
        exclusive: bool = False,
    ) -> None:
        """Keep KV of sequences in `store`, by copies of `engine`.

        Args:
            store: the rank's end of the host KV store.
            engine: copies between `store` and the device's pages.
            page_size: tokens of a page.
            layers: how many layers a page has.
            leased: how many blocks this rank may hold at first.
            counters: where copies and waits are counted.
            exclusive: whether a restored sequence's blocks are freed.
        """
        self._store, self._engine, self._page_size = store, engine, page_size
        self.leased, self.exclusive = leased, exclusive
        self._layers, self._counters = range(layers), counters
        self._sequences: dict[str, _StoredSequence] = {}
        self._copies: list[_Copy] = []
        self._unsent: list[_Unsent] = []
        self._pending_free: list[int] = []
        self._new: list[int] = []
        self._replaced: dict[str, int] = {}

    def take(self, pages: int) -> torch.Tensor:
        """Take blocks to write to, int64 [pages], WRITING. Admission has reserved them.

        If only blocks of ended sequences with running copies are left of the rank's lease, this waits for the copies:
        other blocks are leased to other ranks.
        """
        if self._pending_free and self.held + pages > self.leased:
            self.sync(wait=True)
        blocks = self._store.prepare_store(pages)
        assert blocks is not None, f"{pages} blocks were reserved, {self._store.counts().free} are free"
        return blocks

    @property
    def free(self) -> int:
        """How many blocks of its lease this rank does not hold."""
        return self.leased - self.held

    @property
    def num_pending(self) -> int:
        """How many blocks of ended sequences are freed only when copies to them have ended."""
        return len(self._pending_free)

    @property
    def held(self) -> int:
        """How many blocks this rank holds. A block that several sequences share counts once for each."""
        return len(self._pending_free) + sum(len(sequence.blocks) for sequence in self._sequences.values())

    def adopt(self, name: str, blocks: torch.Tensor, tokens: int, *, shared: Sequence[int] = ()) -> None:
        """Note that a sequence's prompt of `tokens` is in READY blocks: first `shared` ones of others, then its own."""
        self._store.share(shared)
        whole = [*shared, *blocks.tolist()]
        self._sequences[name] = _StoredSequence(blocks=whole, open=tokens % self._page_size != 0, tokens=tokens)

    def extend(self, name: str, blocks: torch.Tensor, tokens: int) -> None:
        """Append READY blocks to a prompt of which whole pages are stored; `tokens` of it are stored then."""
        sequence = self._sequences[name]
        sequence.blocks += blocks.tolist()
        sequence.open, sequence.tokens = tokens % self._page_size != 0, tokens

    def __contains__(self, name: str) -> bool:
        return name in self._sequences

    def fork(self, leader: str, follower: str, *, tokens: int) -> None:
        """Let a sequence begin with the first `tokens` of its leader's prompt, in the same blocks."""
        blocks = self._sequences[leader].blocks[: -(-tokens // self._page_size)]
        self._store.share(blocks)
        self._sequences[follower] = _StoredSequence(
            blocks=list(blocks), open=tokens % self._page_size != 0, tokens=tokens
        )

    def store_blocks_of(self, name: str) -> list[int]:
        """Return the blocks of a sequence, in the order of its pages."""
        return list(self._sequences[name].blocks)

    def take_over(self, name: str, blocks: list[int], tokens: int) -> None:
        """Take over a sequence of another rank, which holds its READY blocks until this has returned."""
        self._store.share(blocks)
        self.adopt(name, torch.tensor(blocks, dtype=torch.int64), tokens)

    def write_through(self, names: list[str], pages: torch.Tensor) -> None:
        """Store device pages [N] that have just become full, one of each sequence.

        The copy begins with the first call of `send_known` or `sync` that finds the page numbers on the host.
        """
        blocks = self.take(len(names))
        for name, block in zip(names, blocks.tolist(), strict=True):
            self._sequences[name].blocks.append(block)
        self._unsent.append(_Unsent(pages=Download(pages), blocks=blocks, owners=names))
        self._counters.add("pages_written_through", len(names))
        self.send_known()

    def send_known(self, *, wait: bool = False) -> None:
        """Begin the copies of written-through pages whose numbers are on the host by now; of all if `wait`."""
        while self._unsent and (wait or self._unsent[0].pages.done):
            unsent = self._unsent.pop(0)
            self._send(unsent.owners, unsent.pages.wait(), unsent.blocks)

    # Streamed decode: a running sequence has all pages in the store, and writes the last one again in each step.

    def grow(self, names: list[str]) -> None:
        """Give each of these sequences one more block, to which the coming pass writes."""
        if not names:
            return
        blocks = self.take(len(names)).tolist()
        for name, block in zip(names, blocks, strict=True):
            self._sequences[name].blocks.append(block)
        self._new += blocks

    def own_open_pages(self, names: list[str]) -> None:
        """Give sequences that begin to run a block of their own for an open page that others share."""
        opened = [name for name in names if self._sequences[name].open]
        held = self._store.references([self._sequences[name].blocks[-1] for name in opened]).tolist()
        shared = [name for name, references in zip(opened, held, strict=True) if references > 1]
        for name in shared:
            self._replaced[name] = self._sequences[name].blocks.pop()
        self.grow(shared)

    def is_replaced(self, name: str) -> bool:
        """Whether the coming pass reads a sequence's open page from a shared block, and writes it to its own."""
        return name in self._replaced

    def open_block_to_read(self, name: str) -> int:
        """Return the block that holds the tokens so far of a sequence's open page."""
        return self._replaced.get(name, self._sequences[name].blocks[-1])

    def written(self) -> None:
        """Complete the new blocks of a pass whose copies have ended, and free the shared blocks that they replace."""
        if self._new:
            self._store.complete_store(self._new)
            self._new = []
        if self._replaced:
            self._store.free(list(self._replaced.values()))
            self._replaced = {}

    def tokens_of(self, name: str) -> int:
        """Return how many tokens of a waiting sequence have their KV in the store."""
        return self._sequences[name].tokens

    def suspend(self, names: list[str], pages: list[torch.Tensor], tokens: list[int]) -> None:
        """Copy to the store the pages of these sequences that it lacks, and wait until all are there.

        Args:
            names: the sequences.
            pages: each sequence's device pages, int64 [P], in its order.
            tokens: how many tokens of each have KV.

        Raises:
            CopyError: a copy failed.
        """
        owners: list[str] = []
        missing = []
        for name, own, number in zip(names, pages, tokens, strict=True):
            sequence = self._sequences.setdefault(name, _StoredSequence())
            sequence.tokens, sequence.open = number, number % self._page_size != 0
            missing.append(own[len(sequence.blocks) :])
            owners += [name] * len(missing[-1])
        if owners:
            blocks = self.take(len(owners))
            for name, block in zip(owners, blocks.tolist(), strict=True):
                self._sequences[name].blocks.append(block)
            self._send(owners, torch.cat(missing), blocks)
        self._counters.add("pages_copied_to_suspend", len(owners))
        self.sync(wait=True)

    def _send(self, owners: list[str], pages: torch.Tensor, blocks: torch.Tensor) -> None:
        ticket = self._engine.store_pages(self._layers, pages, blocks)
        self._copies.append(_Copy(ticket=ticket, blocks=blocks, owners=owners))

    def restore(self, name: str, pages: torch.Tensor, *, there: Sequence[bool] = ()) -> Ticket:
        """Begin to copy a sequence's KV to device pages. The caller waits for the ticket and then calls `restored`.

        Args:
            name: the sequence.
            pages: int64 [P] on the host, one for each of its blocks, in order.
            there: of its first pages, whether the device has them already; those are not copied.
        """
        blocks = torch.tensor(self._sequences[name].blocks, dtype=torch.int64)
        assert len(blocks) == len(pages), f"{name} has {len(blocks)} pages in the store, {len(pages)} on the device"
        lacking = torch.ones(len(blocks), dtype=torch.bool)
        lacking[: len(there)] = ~torch.tensor(there, dtype=torch.bool)
        self._counters.add("pages_restored", int(lacking.sum()))
        return self._engine.load_pages(self._layers, blocks[lacking], pages[lacking])

    def restored(self, name: str) -> None:
        """Note that a sequence's KV is on the device. Its open page's block is freed: the full page is stored later."""
        sequence = self._sequences[name]
        if self.exclusive:
            self._store.free(sequence.blocks)
            sequence.blocks, sequence.open = [], False
        elif sequence.open:
            self._store.free([sequence.blocks.pop()])
            sequence.open = False

    def forget(self, name: str) -> None:
        """Free the blocks of a sequence that has ended, as soon as no copy to them is under way."""
        sequence = self._sequences.pop(name, None)
        if sequence is not None:
            self._pending_free += sequence.blocks
            self._release_idle()

    def _release_idle(self) -> None:
        written_to = [copy.blocks for copy in self._copies] + [unsent.blocks for unsent in self._unsent]
        busy = {block for blocks in written_to for block in blocks.tolist()}
        free = [block for block in self._pending_free if block not in busy]
        if free:
            self._store.free(free)
            self._pending_free = [block for block in self._pending_free if block in busy]

    def copy_rate(self, pages: torch.Tensor) -> float:
        """Measure copies to these device pages [P], in bytes a second: the fastest of a few. Raises CopyError.

        The caller uses the pages for nothing else meanwhile; they hold the same data afterwards. As many blocks are
        free.
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
        """Complete the copies that have ended, or all if `wait`. Raises CopyError if one failed."""
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
