"""Owns the form on the device in which sequences that have outgrown it give way to others.

They move to an overflow with all their KV, that of shared prompt pages too, and come back with pages of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import takewhile

import torch

from sgl_batch.core.admission import Admission
from sgl_batch.core.kv_state import KVState
from sgl_batch.core.page_ledger import pages_for
from sgl_batch.core.plan import Plan
from sgl_batch.kv_offload.device_kv import DeviceKV
from sgl_batch.kv_offload.kv_form import Arrived, RankView
from sgl_batch.kv_offload.kv_tiers import Returning
from sgl_batch.kv_offload.overflow_store import Overflow
from sgl_batch.metrics.counters import Counters
from sgl_batch.sglang_adapter.host_copies import upload_copy
from sgl_batch.sglang_adapter.moving import attach
from sgl_batch.sglang_adapter.scheduling import detach, free_kv, protect_prefix
from sgl_batch.sglang_adapter.types.batches import ScheduleBatch
from sgl_batch.sglang_adapter.types.requests import Request
from sgl_batch.sglang_adapter.types.scheduler import SGLangScheduler


class OverflowKV:
    """A `KVForm` over that of the device alone: suspended sequences leave as far as the overflow has room."""

    def __init__(self, scheduler: SGLangScheduler, counters: Counters, on_device: DeviceKV, overflow: Overflow) -> None:
        self._scheduler, self._counters = scheduler, counters
        self._on_device, self._overflow = on_device, overflow
        self.device = self.admission = on_device.device
        self.sharing, self.leased = on_device.sharing, overflow.leased
        self._returning: list[Returning] = []

    @property
    def returning(self) -> list[Request]:
        return [returning.request for returning in self._returning]

    def state(self, view: RankView) -> KVState:
        arrived = bool(self._returning) and self._returning[0].ticket.done
        return replace(self._on_device.state(view), arrived=arrived)

    def match_and_insert(self, unit: Admission, leader: Request, plan: Plan) -> None:
        self._on_device.match_and_insert(unit, leader, plan)

    def prefill(
        self, requests: list[Request], pages: Sequence[int] | None, make_batch: Callable[[], ScheduleBatch]
    ) -> ScheduleBatch:
        return self._on_device.prefill(requests, pages, make_batch)

    def fork(self, leader: Request, follower: Request) -> bool:
        return self._on_device.fork(leader, follower)

    def end_pass(self, batch: ScheduleBatch) -> None:
        """No copy ran beside the pass."""

    def settle(self, batch: ScheduleBatch, requests: list[Request]) -> None:
        """Their KV lies where the pass has written it."""

    def prepare_to_run(self, requests: list[Request]) -> None:
        """Their KV lies on the device."""

    def step(self, running: ScheduleBatch, plan: Plan) -> None:
        self._on_device.step(running, plan)

    def stream(self, *, on: bool) -> None:
        raise AssertionError("only KV that is in the store whole is streamed")

    def sync(self, *, wait: bool) -> None:
        """Sequences have left when `to_store` returns."""

    def to_store(self, requests: list[Request]) -> None:
        """Those for which the overflow has no room keep their pages."""
        size, table = self.device.page_size, self._scheduler.req_to_token_pool.req_to_token
        leaving, room = list[Request](), 0
        for request in requests:
            room += pages_for(request.kv_committed_len, size)
            if not self._overflow.has_room(room):
                break
            leaving.append(request)
        if not leaving:
            return
        tokens = [request.kv_committed_len for request in leaving]
        pages = [
            table[request.req_pool_idx, :length:size].to(torch.int64) // size
            for request, length in zip(leaving, tokens, strict=True)
        ]
        with self._counters.clock.part("copies"):
            self._overflow.put([request.rid for request in leaving], pages, tokens)
        for request in leaving:
            free_kv(self._scheduler, request)
            detach(self._scheduler, request)
            protect_prefix(request, 0)
            self.admission.leave(request.rid)
            self.admission.add_prompt_pages(-self.sharing.leave(request.rid))
        self._counters.add("sequences_overflowed", len(leaving))

    def restore(self, request: Request) -> None:
        size, stored = self.device.page_size, self._overflow.content
        num_pages = pages_for(stored.tokens_of(request.rid), size)
        kv_indices = self._scheduler.token_to_kv_pool_allocator.alloc(num_pages * size)
        assert kv_indices is not None, f"{num_pages} pages were reserved for {request.rid}"
        pages = (kv_indices[::size] // size).to(torch.int64).cpu()
        ticket = stored.restore(request.rid, pages)
        self._returning.append(Returning(request=request, pages=pages, ticket=ticket))

    def arrived(self, *, wait: bool) -> Arrived:
        came = self._returning if wait else list(takewhile(lambda one: one.ticket.done, self._returning))
        self._returning = self._returning[len(came) :]
        found = Arrived()
        for returning in came:
            returning.ticket.wait()
            self._take_in(returning)
            found.runners.append(returning.request)
        return found

    def _take_in(self, returning: Returning) -> None:
        request, size, stored = returning.request, self.device.page_size, self._overflow.content
        kv_indices = (returning.pages[:, None] * size + torch.arange(size)).flatten()
        kv_indices = upload_copy(kv_indices[: stored.tokens_of(request.rid)], self._scheduler.device)
        stored.forget(request.rid)
        attach(self._scheduler, request, kv_indices)
        self.admission.come_back(request.rid)

    def give_up(self, request: Request) -> None:
        self._on_device.give_up(request)
        self.forget(request.rid)

    def forget(self, name: str) -> None:
        self._overflow.forget(name)
        self.admission.away.discard(name)

    def counts(self) -> dict[str, int]:
        return self._overflow.counts()
