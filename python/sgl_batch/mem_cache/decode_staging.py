"""Owns bringing a decode group's KV to the device layer by layer and sub-batch by sub-batch, and what it changes back.

The device's pages hold two sub-batches of a layer. Which rows make a sub-batch, and in which pages, is decided in
core/decode_streaming; that all of them have slots, by the caller.
"""

from __future__ import annotations

import time
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any

import torch

from sgl_batch.core.decode_streaming import StreamedPart, bring_order
from sgl_batch.mem_cache.copy_engine import CopyEngine, Ticket

_AHEAD = 2  # turns: while one is attended the next is there, or comes


@dataclass(frozen=True, slots=True, kw_only=True)
class PartCopies:
    """Of one sub-batch, the rows `span` of the group: pages [N] that come from slots [N], and pages [R] of its rows'
    last tokens that go to slots [R]. `part` says which of the device's pages it has.
    """

    span: tuple[int, int]
    part: StreamedPart
    load_slots: torch.Tensor
    load_pages: torch.Tensor
    store_pages: torch.Tensor
    store_slots: torch.Tensor

    @property
    def num_rows(self) -> int:
        return self.span[1] - self.span[0]


@dataclass(slots=True, kw_only=True)
class _Pass:
    """One forward pass. Turns are numbered layer by layer.

    `loads`: of turns that come. `leaving`: copies to the store of sub-batches in `layer`; `stores`: of all layers.
    """

    copies: Seq[PartCopies]
    order: list[tuple[int, ...]]
    loads: dict[int, Ticket] = field(default_factory=dict)
    leaving: dict[int, Ticket] = field(default_factory=dict)
    layer: int = 0
    stores: list[Ticket] = field(default_factory=list)


class DecodeStaging:
    """The pages of `pool`, nobody's between two passes. `engine`: copies between them and the store.

    `first_page`: how tables number the first of them, beyond those that sequences hold. Waits for copies are added up
    in `waited_s`.
    """

    def __init__(self, pool: Any, engine: CopyEngine, *, first_page: int) -> None:
        self._pool, self._engine, self._first_page = pool, engine, first_page
        self._own = [pool.page_parts(layer) for layer in range(pool.layer_num)]
        self._pass: _Pass | None = None
        self.waited_s = 0.0
        self.pages_brought = 0
        self._ordered: list[StreamedPart] = []
        self._last_order: list[tuple[int, ...]] = []

    @property
    def spans(self) -> list[tuple[int, int]]:
        """The rows of each sub-batch of the pass."""
        assert self._pass is not None, "a pass has begun"
        return [copies.span for copies in self._pass.copies]

    def begin(self, copies: Seq[PartCopies]) -> None:
        """The next forward pass is a decode step of these sub-batches. All slots are READY, or new ones to store to."""
        assert self._pass is None, "one pass at a time"
        self._pass = _Pass(copies=copies, order=self._order([one.part for one in copies]))
        self._pool.redirect(self._own, self._first_page)
        self._bring(self._pass.order[0])
        self.pages_brought += sum(len(one.load_slots) for one in copies)

    def _order(self, parts: list[StreamedPart]) -> list[tuple[int, ...]]:
        if parts != self._ordered:
            self._ordered = parts
            self._last_order = list(bring_order(parts, self._pool.layer_num, ahead=_AHEAD))
        return self._last_order

    def _bring(self, turns: Seq[int]) -> None:
        assert self._pass is not None, "a pass has begun"
        for turn in turns:
            layer, index = divmod(turn, len(self._pass.copies))
            copies = self._pass.copies[index]
            if len(copies.load_slots):
                self._pass.loads[turn] = self._engine.load_pages(
                    range(layer, layer + 1), copies.load_slots, copies.load_pages
                )

    def rows_wanted(self, layer: int, index: int) -> None:
        """Wait until a sub-batch's KV of a layer is there, and its pages are nobody's source any more."""
        assert self._pass is not None, "a pass has begun"
        ticket = self._pass.loads.pop(layer * len(self._pass.copies) + index, None)
        if ticket is not None:
            self._wait(ticket)
        if layer != self._pass.layer:
            self._pass.layer, self._pass.leaving = layer, {}
        part = self._pass.copies[index].part
        for earlier in [i for i in self._pass.leaving if self._pass.copies[i].part.overlaps(part)]:
            self._wait(self._pass.leaving.pop(earlier))

    def rows_attended(self, layer: int, index: int) -> None:
        """A sub-batch has been attended in a layer: its last tokens' pages go back, and the next ones may come."""
        assert self._pass is not None, "a pass has begun"
        copies = self._pass.copies[index]
        ticket = self._engine.store_pages(range(layer, layer + 1), copies.store_pages, copies.store_slots)
        self._pass.leaving[index] = ticket
        self._pass.stores.append(ticket)
        self._bring(self._pass.order[layer * len(self._pass.copies) + index + 1])

    def end(self) -> None:
        """The pass is over: all is in the store. Raises CopyError where a copy failed."""
        assert self._pass is not None, "a pass has begun"
        ended, self._pass = self._pass, None
        self._pool.redirect(self._own, 0)
        for ticket in ended.stores:
            self._wait(ticket)

    def _wait(self, ticket: Ticket) -> None:
        began = time.perf_counter()
        ticket.wait()
        self.waited_s += time.perf_counter() - began
