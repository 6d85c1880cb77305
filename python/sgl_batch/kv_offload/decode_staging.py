"""Owns bringing a decode group's KV to the device layer by layer and sub-batch by sub-batch, and what it changes back.

The device's pages of all layers together are two halves, each for a sub-batch of a layer. Which rows make a sub-batch,
and who comes when, is decided in core/decode_streaming; that all of them have blocks, by the caller.
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
    """Of a sub-batch, the rows `span` of the group: pages [N] of a half that come from blocks [N], and pages [R] of its
    rows' last tokens that go to blocks [R]. `part`: how it is laid out.
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
    """Pages as a pool has them, the same ones for every layer."""

    def __init__(self, parts: tuple[torch.Tensor, ...], layer_num: int) -> None:
        self.layer_num, self._parts = layer_num, parts

    def page_parts(self, layer: int) -> tuple[torch.Tensor, ...]:
        return self._parts


class DecodeStaging:
    """The pages of `pool`, nobody's between two passes. What the host waits for copies is added up in `waited_s`.

    The pool's layers are led to a half while attention of the group is planned, and in each layer from
    `before_attention` to `after_attention` of a sub-batch. Prompts of the same pass need a staging of their own: no
    page of the pool is free for them. `first_page`: how tables number the first page of a half, beyond the pages that
    sequences hold.
    """

    def __init__(self, pool: Any, engines: CopyEngines, *, first_page: int) -> None:
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
        """Begin a decode step of these sub-batches. Blocks are READY, or new ones that the step stores to."""
        assert not self._copies, "one pass at a time"
        self._copies = copies
        parts = [one.part for one in copies]
        if parts != self._parts:
            self._parts, self._turns = parts, take_turns(parts, self._pool.layer_num)
        self._bring(first_turns(self._turns))
        self.pages_brought += sum(len(one.load_blocks) for one in copies)

    def redirect_pool(self, half: int = 0) -> None:
        """Lead the pool's layers to a half."""
        self._pool.redirect([self._halves[half]] * self._pool.layer_num, self._first_page)

    def restore_pool(self) -> None:
        """Let the pool's layers be its own pages again."""
        self._pool.redirect(self._own, 0)

    def _bring(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            turn = self._turns[number]
            copies, layer = self._copies[turn.index], turn.layer
            pages = copies.load_pages + turn.half * self.half_pages
            self._loads[number] = self._engine.load_pages(range(layer, layer + 1), copies.load_blocks, pages)

    def before_attention(self, layer: int, index: int) -> None:
        """Wait until a sub-batch's KV of a layer is there, and its pages are nobody's source any more."""
        number = layer * len(self._copies) + index
        turn = self._turns[number]
        began = time.perf_counter()
        self._loads[number].device_waits()
        for earlier in turn.frees:
            self._stores[earlier].device_waits()
        self.waited_s += time.perf_counter() - began
        self.redirect_pool(turn.half)

    def after_attention(self, layer: int, index: int, end: int) -> None:
        """A sub-batch has been attended in a layer: its last tokens' pages go back, and the next ones may come."""
        self.restore_pool()
        number = layer * len(self._copies) + index
        turn, copies = self._turns[number], self._copies[index]
        pages = copies.store_pages + turn.half * self.half_pages
        self._stores[number] = self._engine.store_pages(range(layer, layer + 1), pages, copies.store_blocks)
        self._bring(turn.then)

    def end(self) -> None:
        """The pass is over: all is in the store. Raises CopyError where a copy failed."""
        self._copies = ()
        began = time.perf_counter()
        for ticket in [*self._loads.values(), *self._stores.values()]:
            ticket.wait()
        self._loads, self._stores = {}, {}
        self.waited_s += time.perf_counter() - began

    def close(self) -> None:
        """End the copies. No pass is under way."""
        self._engine.close()
