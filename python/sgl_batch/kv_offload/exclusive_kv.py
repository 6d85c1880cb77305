"""Owns KV of which a page lies on the device or in the host store, not in both.

Prompts are computed in pages of the device where the decision says so, else on their way to the store; all pages of a
sequence move together. The account for admission is that of both tiers together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from sgl_batch.core.admission import Admission, reserve
from sgl_batch.core.kv_state import KVState
from sgl_batch.core.page_ledger import PageLedger
from sgl_batch.core.plan import Plan
from sgl_batch.kv_offload.kv_form import Arrived, RankView
from sgl_batch.kv_offload.store_kv import StoreKV
from sgl_batch.metrics.counters import Counters
from sgl_batch.sglang_adapter.types.batches import ScheduleBatch
from sgl_batch.sglang_adapter.types.requests import Request


class ExclusiveKV:
    """A `KVForm`. The device's account has READY sequences as well whose prompts stay there, with the pages to run.

    Prompts that begin alike share nothing: their pages would lie in both tiers.
    """

    def __init__(self, store: StoreKV, counters: Counters) -> None:
        self._store, self._counters = store, counters
        self.device, self.sharing = store.device, store.sharing
        total, size = store.device.total_pages, store.device.page_size
        self.admission = PageLedger(total, size, overflow_pages=store.tiers.share)
        self._stays = False

    @property
    def returning(self) -> list[Request]:
        return self._store.returning

    def state(self, view: RankView) -> KVState:
        return replace(
            self._store.state(view),
            admission=self.admission,
            estimate_shared=lambda _: None,
            store_free=self._store.tiers.stored.free,
        )

    def match_and_insert(self, unit: Admission, leader: Request, plan: Plan) -> None:
        reserve(unit, self.admission, held=0, new=0)

    def prefill(
        self, requests: list[Request], pages: Sequence[int] | None, make_batch: Callable[[], ScheduleBatch]
    ) -> ScheduleBatch:
        self._stays = pages is not None
        if pages is None:
            return self._store.prefill(requests, None, make_batch)
        self._counters.add("prompts_prefilled_on_device", len(requests))
        for request, number in zip(requests, pages, strict=True):
            self.device.reserve(request.rid, number)
        return make_batch()

    def fork(self, leader: Request, follower: Request) -> bool:
        """Each choice has references of its own to the prompt's blocks, which go when it comes to the device."""
        self._counters.add("prompt_tokens_shared", len(leader.origin_input_ids) - 1)
        self._store.fork_stored(leader, follower)
        return False

    def end_pass(self, batch: ScheduleBatch) -> None:
        self._store.end_pass(batch)

    def settle(self, batch: ScheduleBatch, requests: list[Request]) -> None:
        """Prompts that stay on the device wait there."""
        if not batch.forward_mode.is_extend():
            return
        stayed, self._stays = self._stays, False
        if not (self._store.left_device(batch, requests) or stayed):
            self._store.run_on(requests)

    def to_store(self, requests: list[Request]) -> None:
        self._store.to_store(requests)

    def restore(self, request: Request) -> None:
        self._store.restore(request)

    def arrived(self, *, wait: bool) -> Arrived:
        return self._store.arrived(wait=wait)

    def prepare_to_run(self, requests: list[Request]) -> None:
        """Their prompts have stayed on the device."""

    def step(self, running: ScheduleBatch, plan: Plan) -> None:
        running.prepare_for_decode()

    def stream(self, *, on: bool) -> None:
        raise AssertionError("what is streamed lies in the store whole")

    def give_up(self, request: Request) -> None:
        self._store.give_up(request)

    def forget(self, name: str) -> None:
        self._store.forget(name)

    def sync(self, *, wait: bool) -> None:
        self._store.sync(wait=wait)

    def counts(self) -> dict[str, int]:
        return self._store.counts()
