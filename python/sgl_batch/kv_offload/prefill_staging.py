"""Owns the two layers of KV that the device holds of a prefill group on its way to the store (BatchGen 5.2).

Even layers write to one half, odd layers to the other; a layer waits until the KV of two layers before is copied from
its half. Which sequences make a group, and their blocks, are given.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch

from sgl_batch.kv_offload.copy_engine import CopyEngine, CopyEngines, Ticket
from sgl_batch.kv_offload.host_kv_store import HostKVStore

_HALVES = 2


@dataclass(slots=True, kw_only=True)
class _Group:
    """Pages of a group in the order of its rows.

    `blocks` [P]: to which the pages go. `ends` [P]: the row that completes a page, plus one.
    `restored` [R]: blocks of pages that were computed before; their pages come first. `loads`, `stores`: copies by
    layer. `sent`: how many of the current layer's pages are being stored.
    """

    blocks: torch.Tensor
    ends: torch.Tensor
    restored: torch.Tensor
    loads: dict[int, Ticket] = field(default_factory=dict)
    stores: dict[int, list[Ticket]] = field(default_factory=dict)
    sent: int = 0


class PrefillStaging:
    """Two layers of pages in memory of their own, through which a prefill group's KV goes to the store.

    One pass: `begin`; for each layer and each sub-batch, in order, `before_attention` and `after_attention`; `end`.
    The pool's layers point here between `before_attention` and `after_attention`, and between `redirect_pool` and
    `restore_pool` while attention of the group is planned; otherwise to the pool's own pages.

    `first_kv_index`: the KV index of the first staged token. `waited_s`: the time in seconds that the host has waited
    for copies. `peak_pages`, `peak_bytes`: the staged pages of a layer, and the bytes of both halves, of the largest
    group so far; the memory stays until `close`.
    """

    def __init__(self, store: HostKVStore, pool: Any, engines: CopyEngines, *, first_page: int) -> None:
        """Stage on the way from `pool` to `store`. Memory is taken by `begin`.

        Args:
            store: holds the blocks, which `end` completes.
            pool: the device's pages, with `page_parts` and `redirect` as in DevicePagePool.
            engines: makes the copy engine of the staged pages; each larger group needs a new one.
            first_page: the number of the first staged page, behind the device's own.
        """
        self._store, self._pool, self._engines, self._first_page = store, pool, engines, first_page
        self.layer_num: int = pool.layer_num
        self.first_kv_index: int = first_page * pool.page_size
        self._own = [pool.page_parts(layer) for layer in range(pool.layer_num)]
        self._halves: list[tuple[torch.Tensor, ...]] = []
        self._engine: CopyEngine | None = None
        self._group: _Group | None = None
        self.waited_s = 0.0
        self.peak_bytes = self.peak_pages = 0

    def page_parts(self, layer: int) -> tuple[torch.Tensor, ...]:
        """Return a layer's half, as a pool returns a layer's pages."""
        return self._halves[layer % _HALVES]

    def begin(self, lengths: Sequence[int], blocks: torch.Tensor, *, restored: torch.Tensor) -> None:
        """Begin a pass that prefills a group.

        Staged pages are numbered one after the other: first those of `restored`, then the prompts' own in the order of
        their rows. The caller holds all blocks until `end`.

        Args:
            lengths: the new tokens of each prompt, in the order of rows.
            blocks: int64 [P], WRITING: one for each new page, in the order of rows.
            restored: int64 [R], READY: blocks of pages that were computed before, loaded in each layer.
        """
        assert self._group is None, "one group is prefilled at a time"
        size = self._pool.page_size
        ends, row = [], 0
        for length in lengths:
            ends += [row + min(end, length) for end in range(size, length + size, size)]
            row += length
        assert len(ends) == len(blocks), f"{len(ends)} pages for {len(blocks)} blocks"
        self._make_room(len(restored) + len(ends))
        self._group = _Group(blocks=blocks, ends=torch.tensor(ends), restored=restored)
        self._load(0)

    @property
    def spans(self) -> None:
        """None: sub-batches may have any rows."""

    def redirect_pool(self) -> None:
        """Point the pool's layers to the staged pages."""
        self._pool.redirect([self.page_parts(layer) for layer in range(self.layer_num)], self._first_page)

    def restore_pool(self) -> None:
        """Point the pool's layers to its own pages again."""
        self._pool.redirect(self._own, 0)

    def _make_room(self, pages: int) -> None:
        if self._halves and len(self._halves[0][0]) >= pages:
            return
        self.close()
        self._halves = [
            tuple(part.new_zeros((pages, *part.shape[1:])) for part in self._own[0]) for _ in range(_HALVES)
        ]
        self.peak_pages = pages
        self.peak_bytes = sum(part.nbytes for half in self._halves for part in half)
        self._engine = self._engines.engine_for(self)

    def _load(self, layer: int) -> None:
        """Begin to load the restored pages of a layer to its half, which attention of two layers before has left."""
        group = self._group
        assert group is not None, "a group has begun"
        assert self._engine is not None, "it has room"
        if len(group.restored) and layer < self.layer_num:
            pages = torch.arange(len(group.restored))
            group.loads[layer] = self._engine.load_pages(range(layer, layer + 1), group.restored, pages)

    def before_attention(self, layer: int, index: int) -> None:
        """Make a layer's half ready for a sub-batch's attention, which writes there and reads what came before.

        Args:
            layer: counted from this process's first.
            index: the sub-batch, counted within the group.
        """
        if index == 0:
            self._begin_layer(layer)
        self.redirect_pool()

    def _begin_layer(self, layer: int) -> None:
        group = self._group
        assert group is not None, "a group has begun"
        group.sent = 0
        self._device_waits(group.stores.get(layer - _HALVES, []))
        self._load(layer + 1)
        if layer in group.loads:
            self._device_waits([group.loads[layer]])

    def after_attention(self, layer: int, index: int, end: int) -> None:
        """Begin to store the pages that a sub-batch has completed in a layer.

        Args:
            layer: counted from this process's first.
            index: the sub-batch, counted within the group.
            end: the sub-batch's last row, plus one.
        """
        self.restore_pool()
        group = self._group
        assert group is not None, "a group has begun"
        assert self._engine is not None, "it has room"
        complete = int(torch.searchsorted(group.ends, end, right=True))
        if complete == group.sent:
            return
        pages, blocks = torch.arange(group.sent, complete) + len(group.restored), group.blocks[group.sent : complete]
        ticket = self._engine.store_pages(range(layer, layer + 1), pages, blocks)
        group.stores.setdefault(layer, []).append(ticket)
        group.sent = complete

    def end(self) -> None:
        """End the pass: wait for all copies, and complete the group's blocks, which are then READY.

        Raises:
            CopyError: a copy failed; the blocks stay WRITING.
        """
        group = self._group
        assert group is not None, "a group has begun"
        self._group = None
        began = time.perf_counter()
        for ticket in [*group.loads.values(), *chain.from_iterable(group.stores.values())]:
            ticket.wait()
        self.waited_s += time.perf_counter() - began
        self._store.complete_store(group.blocks)

    def _device_waits(self, tickets: Sequence[Ticket]) -> None:
        began = time.perf_counter()
        for ticket in tickets:
            ticket.device_waits()
        self.waited_s += time.perf_counter() - began

    def close(self) -> None:
        """Free the staged memory. No group is under way."""
        if self._engine is not None:
            self._engine.close()
        self._engine, self._halves = None, []
