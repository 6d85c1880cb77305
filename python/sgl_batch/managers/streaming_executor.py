"""Owns decode steps whose KV is brought from the store layer by layer and sub-batch by sub-batch (BatchGen 5.3).

The group is as large as the store then, and not as the device: nobody who runs holds pages of the device. Where that is
slower than running those who fit, they run as with any store. Which of the two is decided in core/decode_streaming.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from sgl_batch.core.coroutine import Event
from sgl_batch.core.decode_streaming import StreamingChoice
from sgl_batch.core.plan import Plan
from sgl_batch.core.primitives import combine
from sgl_batch.core.residency import decide_residency
from sgl_batch.managers.kv_tiers import KVTiers
from sgl_batch.managers.tiered_executor import TieredExecutor
from sgl_batch.managers.trace import TraceWriter
from sgl_batch.model_executor.counters import Counters
from sgl_batch.sglang_adapter.moving import take_in
from sgl_batch.sglang_adapter.scheduling import decode_batches, detach, merge_into


class StreamingExecutor(TieredExecutor):
    """A tiered executor that streams: always, or where its `choice` says so, from what it has measured."""

    def __init__(
        self,
        scheduler: Any,
        plan: Plan,
        counters: Counters,
        trace: TraceWriter,
        tiers: KVTiers,
        choice: StreamingChoice | None = None,
    ) -> None:
        super().__init__(scheduler, plan, counters, trace, tiers)
        self._rows = tiers.streamed_rows()
        self._choice, self._streams = choice, choice is None
        self._page = _Page()

    # At a boundary.

    def turn_page(self, running: Any, *, others_run: bool = False) -> Any:
        running = self._choose(running)
        with self._page.timed():
            if not self._streams:
                return super().turn_page(running, others_run=others_run)
            self.stored.sync(wait=False)
            if self._restore_choices(running):
                return self._await_returning(running)
            running = self._join(running)
        self.begin_page()
        return running

    def _choose(self, running: Any) -> Any:
        """Stream the next page, or do not; where that changes, whoever runs is suspended, which copies little."""
        if self._choice is None or self._arrived_forks:
            return running
        page, alive = self._page, [*(self.table[request.rid] for request in running.reqs), *self.table.ready]
        if page.rows:
            self._choice.note(page.alive, streamed=self._streams, rows=page.rows, seconds=page.seconds)
        self._page = _Page(alive=len(alive))
        fits = sum(self.ledger.whole_pages(sequence) for sequence in alive) <= self.ledger.total_pages
        if self._choice.choose(len(alive), fits=fits) == self._streams:
            return running
        running = self._await_returning(running)
        if self._arrived_forks:
            return running
        runners = [self.table[request.rid] for request in running.reqs]
        self._suspend(runners, running, "it goes on with its KV streamed, or no more")
        self._streams = not self._streams
        return running

    def _restore_choices(self, running: Any) -> bool:
        """Choices compute their prompt's last token in pages of the device; whether there are any."""
        choices = [s for s in self.table.ready if not self.table.request_named(s.sequence_id).output_ids]
        if not choices:
            return False
        turn = decide_residency(
            [], choices, self.ledger, self.plan, prompts=self._prompts, pages_of=self._sharing.pages_of
        )
        self._restore(turn.restore, running)
        return True

    def _join(self, running: Any) -> Any:
        """The decode batch with those that have waited longest, as many as the plan has room for."""
        waiting = sorted(self.table.ready, key=lambda s: s.waits_since)[: self.plan.decode.b_moe - len(running.reqs)]
        requests = [self.table.take_ready(sequence.sequence_id) for sequence in waiting]
        self.stored.own_open_pages([request.rid for request in requests])
        for request in requests:
            self.ledger.reserve(request.rid, 0)
            take_in(self._scheduler, request, torch.zeros(request.kv_committed_len, dtype=torch.int64))
        for joining in decode_batches(self._scheduler, requests):
            running = merge_into(running, joining)
        self.table.record(combine(waiting, Event.COMBINE_DECODE, "its KV is streamed"))
        return running

    def _give_up_kv(self, request: Any) -> None:
        if self._streams and request.req_pool_idx is not None:
            detach(self._scheduler, request)  # its table leads to no pages of its own
        super()._give_up_kv(request)
        self._rows.forget(request.rid)

    def _to_store(self, requests: list[Any]) -> None:
        super()._to_store(requests)
        for request in requests:
            self._rows.forget(request.rid)

    # A step.

    def decode_step(self, running: Any) -> Any:
        self._page.begin_step(len(running.reqs))
        if not self._streams:
            return super().decode_step(running)
        self._rows.prepare(running.reqs, self.plan, lambda name: self.ledger.whole_pages(self.table[name]))
        with self._tiers.decoding_staged():
            running.prepare_for_decode()
        self._tiers.begin_streamed_step(self._rows.copies(running.reqs))
        self._counters.add("streamed_steps")
        self.count_step()
        return running

    @property
    def overlaps(self) -> bool:
        """A streamed step ends with its KV in the store, before the next one reads it."""
        return not self._streams

    def after_results(self, batch: Any, requests: list[Any]) -> None:
        streamed = self._streams and batch.forward_mode.is_decode()
        if streamed:
            with self._counters.clock.part("copies"):
                self._tiers.end_streamed_step()
        super().after_results(batch, requests)
        if streamed:
            for request in requests:
                if request.finished():
                    self._rows.forget(request.rid)
        if batch.forward_mode.is_decode():
            self._page.end_step()

    def _write_through(self, requests: list[Any]) -> None:
        """What is streamed is in the store already, and choices go there as a whole."""
        if not self._streams:
            super()._write_through(requests)

    def _prefilled_on_device(self, requests: list[Any]) -> None:
        """Choices leave the device, whose pages are for those whose KV is streamed."""
        if self._streams:
            self._to_store(requests)
        else:
            super()._prefilled_on_device(requests)


@dataclass(slots=True, kw_only=True)
class _Page:
    """What the steps since a boundary have computed for how many sequences alive, and how long they took with it.

    A step may begin before the one before it ends.
    """

    alive: int = 0
    rows: int = 0
    seconds: float = 0.0
    _under_way: int = 0
    _since: float = 0.0

    def begin_step(self, rows: int) -> None:
        self.rows += rows
        if not self._under_way:
            self._since = time.perf_counter()
        self._under_way += 1

    def end_step(self) -> None:
        now = time.perf_counter()
        self.seconds += now - self._since
        self._since = now
        self._under_way -= 1

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Time at the boundary counts as well."""
        began = time.perf_counter()
        yield
        self.seconds += time.perf_counter() - began
