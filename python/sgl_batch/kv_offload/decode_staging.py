"""Owns streaming a decode group's KV: from the store to the device by layer and sub-batch, and the changed pages back.

The device's pages of all layers together are cut into two halves, each for one sub-batch of one layer. Which rows make
a sub-batch, and in which turn each comes, is decided in core/decode_streaming. The caller gives every row its blocks.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from sgl_batch.core.decode_streaming import StreamedPart, Turn, first_turns, take_turns
from sgl_batch.kv_offload.copy_engine import CopyEngines, Ticket

_HALVES = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class PartCopies:
    """The copies of one sub-batch in a layer. All tensors are int64 on the host; pages are counted within a half.

    `span`: the sub-batch's rows [start, end) of the group. `part`: its layout.
    `load_blocks`, `load_pages` [N]: blocks that are loaded, and the pages to which they go.
    `store_pages`, `store_blocks` [R]: the pages with the rows' last tokens, and the blocks to which they go.
    """

    span: tuple[int, int]
    part: StreamedPart
    load_blocks: torch.Tensor
    load_pages: torch.Tensor
    store_pages: torch.Tensor
    store_blocks: torch.Tensor

    @property
    def num_rows(self) -> int:
        return self.span[1] - self.span[0]


class _AllLayers:
    """A pool whose layers all have the same pages."""

    def __init__(self, parts: tuple[torch.Tensor, ...], layer_num: int) -> None:
        self.layer_num, self._parts = layer_num, parts

    def page_parts(self, layer: int) -> tuple[torch.Tensor, ...]:
        return self._parts


class DecodeStaging:
    """Streams the KV of decode steps through the pages of a pool.

    One pass: `begin`; for each layer and each sub-batch, in order, `before_attention` and `after_attention`; `end`.
    The pool's layers point to a half between `before_attention` and `after_attention` of a sub-batch, and between
    `redirect_pool` and `restore_pool` while attention of the group is planned; otherwise to the pool's own pages. While
    streaming is on, no sequence holds pages of the pool, and prompts of the same pass need a staging of their own.

    `first_kv_index`: the KV index of a half's first token, as the tables count it.
    `half_pages`: the pages of a half, which is the most that a sub-batch can use (twice that for a large one).
    `waited_s`: the time in seconds that the host has waited for copies. `pages_brought`: pages loaded, each
    counted once a step.
    """

    def __init__(self, pool: Any, engines: CopyEngines, *, first_page: int) -> None:
        """Stage in the pages of `pool`, by a copy engine of its own.

        Args:
            pool: the device's pages, with `all_parts`, `page_parts` and `redirect` as in DevicePagePool.
            engines: makes the copy engine; the store has the pool's geometry.
            first_page: the number of a half's first page in the tables, behind all pages that sequences can hold.
        """
        self._pool, self._first_page = pool, first_page
        self.first_kv_index: int = first_page * pool.page_size
        self._own = [pool.page_parts(layer) for layer in range(pool.layer_num)]
        parts: tuple[torch.Tensor, ...] = pool.all_parts
        self.half_pages = len(parts[0]) // _HALVES
        self._halves = [tuple(part[half * self.half_pages :] for part in parts) for half in range(_HALVES)]
        self._engine = engines.engine_for(_AllLayers(parts, pool.layer_num))
        self._copies: Sequence[PartCopies] = ()
        self._parts: list[StreamedPart] = []
        self._turns: list[Turn] = []
        self._loads: dict[int, Ticket] = {}
        self._stores: dict[int, Ticket] = {}
        self.waited_s = 0.0
        self.pages_brought = 0

    @property
    def spans(self) -> list[tuple[int, int]]:
        """The rows of each sub-batch of the pass."""
        return [copies.span for copies in self._copies]

    def begin(self, copies: Sequence[PartCopies]) -> None:
        """Begin a decode step: load the first sub-batches.

        Args:
            copies: the step's sub-batches, which cover the group's rows in order. The caller holds all blocks until
                `end`. Blocks to load are READY. Blocks to store to are WRITING, or READY with one reference.

        Raises:
            StoreFault: a block is in another state.
        """
        assert not self._copies, "one pass at a time"
        self._copies = copies
        parts = [one.part for one in copies]
        if parts != self._parts:
            self._parts, self._turns = parts, take_turns(parts, self._pool.layer_num)
        self._bring(first_turns(self._turns))
        self.pages_brought += sum(len(one.load_blocks) for one in copies)

    def redirect_pool(self, half: int = 0) -> None:
        """Point the pool's layers to a half."""
        self._pool.redirect([self._halves[half]] * self._pool.layer_num, self._first_page)

    def restore_pool(self) -> None:
        """Point the pool's layers to its own pages again."""
        self._pool.redirect(self._own, 0)

    def _bring(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            turn = self._turns[number]
            copies, layer = self._copies[turn.index], turn.layer
            pages = copies.load_pages + turn.half * self.half_pages
            self._loads[number] = self._engine.load_pages(range(layer, layer + 1), copies.load_blocks, pages)

    def before_attention(self, layer: int, index: int) -> None:
        """Let the device wait until a sub-batch's KV of a layer has come, and until its pages are no copy's source.

        Args:
            layer: counted from this process's first.
            index: the sub-batch, counted within the group.
        """
        number = layer * len(self._copies) + index
        turn = self._turns[number]
        began = time.perf_counter()
        self._loads[number].device_waits()
        for earlier in turn.frees:
            self._stores[earlier].device_waits()
        self.waited_s += time.perf_counter() - began
        self.redirect_pool(turn.half)

    def after_attention(self, layer: int, index: int, end: int) -> None:
        """Store the pages with an attended sub-batch's last tokens in a layer, and load the next sub-batch.

        Args:
            layer: counted from this process's first.
            index: the sub-batch, counted within the group.
            end: the sub-batch's last row, plus one.
        """
        self.restore_pool()
        number = layer * len(self._copies) + index
        turn, copies = self._turns[number], self._copies[index]
        pages = copies.store_pages + turn.half * self.half_pages
        self._stores[number] = self._engine.store_pages(range(layer, layer + 1), pages, copies.store_blocks)
        self._bring(turn.then)

    def end(self) -> None:
        """End the pass: wait for all copies. The step's KV is then in the blocks, which the caller completes.

        Raises:
            CopyError: a copy failed.
        """
        self._copies = ()
        began = time.perf_counter()
        for ticket in [*self._loads.values(), *self._stores.values()]:
            ticket.wait()
        self._loads, self._stores = {}, {}
        self.waited_s += time.perf_counter() - began

    def close(self) -> None:
        """Close the copy engine. No pass is under way."""
        self._engine.close()
