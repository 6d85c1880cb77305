"""Owns the streamed form: a decode step's KV comes from the store by layer and by sub-batch (BatchGen 5.3).

While decode is streamed, no running sequence holds device pages. While it is not, sequences run as with an inclusive
store. Which of the two is faster is decided in core.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from sgl_batch.core.admission import Admission
from sgl_batch.core.kv_state import KVState
from sgl_batch.core.page_ledger import pages_for
from sgl_batch.core.plan import Plan
from sgl_batch.kv_offload.kv_form import Arrived, RankView
from sgl_batch.kv_offload.store_kv import StoreKV
from sgl_batch.metrics.counters import Counters
from sgl_batch.sglang_adapter.moving import attach
from sgl_batch.sglang_adapter.scheduling import detach
from sgl_batch.sglang_adapter.types.batches import ScheduleBatch
from sgl_batch.sglang_adapter.types.requests import Request
from sgl_batch.sglang_adapter.types.scheduler import SGLangScheduler


class StreamedKV:
    """A `KVForm` over an inclusive store. It streams after `stream(on=True)`; `streams` says how it begins."""

    def __init__(self, scheduler: SGLangScheduler, counters: Counters, store: StoreKV, *, streams: bool) -> None:
        self._scheduler, self._counters, self._store = scheduler, counters, store
        self._tiers = store.tiers
        self.device, self.admission, self.sharing = store.device, store.admission, store.sharing
        self.leased = store.leased
        self._rows = self._tiers.streamed_rows()
        self._streams = streams

    @property
    def returning(self) -> list[Request]:
        return self._store.returning

    def state(self, view: RankView) -> KVState:
        return replace(self._store.state(view), streams=self._streams)

    def match_and_insert(self, unit: Admission, leader: Request, plan: Plan) -> None:
        self._store.match_and_insert(unit, leader, plan)

    def prefill(
        self, requests: list[Request], pages: Sequence[int] | None, make_batch: Callable[[], ScheduleBatch]
    ) -> ScheduleBatch:
        return self._store.prefill(requests, pages, make_batch)

    def fork(self, leader: Request, follower: Request) -> bool:
        return self._store.fork(leader, follower)

    def end_pass(self, batch: ScheduleBatch) -> None:
        self._store.end_pass(batch)
        if self._streams and batch.forward_mode.is_decode():
            with self._counters.clock.part("copies"):
                self._tiers.end_streamed_step()

    def settle(self, batch: ScheduleBatch, requests: list[Request]) -> None:
        """As KVForm. Streamed KV is in the store already; choices leave the device, whose pages are for streamed KV."""
        if not self._streams:
            self._store.settle(batch, requests)
        elif not self._store.left_device(batch, requests) and batch.forward_mode.is_extend():
            self.to_store(requests)

    def to_store(self, requests: list[Request]) -> None:
        self._store.to_store(requests)
        for request in requests:
            self._rows.forget(request.rid)

    def restore(self, request: Request) -> None:
        self._store.restore(request)

    def arrived(self, *, wait: bool) -> Arrived:
        return self._store.arrived(wait=wait)

    def prepare_to_run(self, requests: list[Request]) -> None:
        """Give them table rows without device pages; the next `step` lays the tables."""
        self._tiers.stored.own_open_pages([request.rid for request in requests])
        for request in requests:
            self.device.reserve(request.rid, 0)
            attach(self._scheduler, request, torch.zeros(request.kv_committed_len, dtype=torch.int64))

    def step(self, running: ScheduleBatch, plan: Plan) -> None:
        if not self._streams:
            self._store.step(running, plan)
            return
        self._rows.prepare(running.reqs, plan, self._whole_pages)
        with self._tiers.decoding_staged():
            running.prepare_for_decode()
        self._tiers.begin_streamed_step(self._rows.copies(running.reqs))
        self._counters.add("streamed_steps")

    def _whole_pages(self, request: Request) -> int:
        """Return the most pages that a request's KV can take: the last token sampled has no KV."""
        tokens = len(request.origin_input_ids) + max(request.sampling_params.max_new_tokens, 1) - 1
        return pages_for(tokens, self.device.page_size)

    def stream(self, *, on: bool) -> None:
        self._streams = on

    def give_up(self, request: Request) -> None:
        if self._streams and request.req_pool_idx is not None:
            detach(self._scheduler, request)  # its table points to staged pages, which are not its own
        self._store.give_up(request)
        self._rows.forget(request.rid)

    def forget(self, name: str) -> None:
        self._store.forget(name)
        self._rows.forget(name)

    def sync(self, *, wait: bool) -> None:
        self._store.sync(wait=wait)

    def counts(self) -> dict[str, int]:
        return self._store.counts()
