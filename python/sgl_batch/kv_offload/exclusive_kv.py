"""Owns the exclusive form: a page of KV is on the device or in the host store, never in both.

Prompts are computed in device pages where the decision says so, else staged to the store. All pages of a sequence move
together. The ledger for admission has both tiers together.
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
    """A `KVForm`. READY sequences whose prompts stay on the device hold, in its ledger, the pages to run as well.

    Prompts share no prefixes: a shared page could be needed in both tiers.
    """

    def __init__(self, store: StoreKV, counters: Counters) -> None:
        self._store, self._counters = store, counters
        self.device, self.sharing = store.device, store.sharing
        total, size = store.device.total_pages, store.device.page_size
        self.admission = PageLedger(total, size, overflow_pages=store.tiers.share, pool_pages=store.tiers.pool_blocks)
        self.leased = store.tiers.leased(self.admission)
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
        reserve(unit, self.admission, held=0, new=0, plan=plan)

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
        """As KVForm. Each choice has its own references to the prompt's blocks, freed when it is restored."""
        self._counters.add("prompt_tokens_shared", len(leader.origin_input_ids) - 1)
        self._store.fork_stored(leader, follower)
        return False

    def end_pass(self, batch: ScheduleBatch) -> None:
        self._store.end_pass(batch)

    def settle(self, batch: ScheduleBatch, requests: list[Request]) -> None:
        """As KVForm. Prompts that stay on the device wait there."""
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
        """Do nothing: their prompts have stayed on the device."""

    def step(self, running: ScheduleBatch, plan: Plan) -> None:
        running.prepare_for_decode()

    def stream(self, *, on: bool) -> None:
        raise AssertionError("streamed decode needs an inclusive store")

    def give_up(self, request: Request) -> None:
        self._store.give_up(request)

    def forget(self, name: str) -> None:
        self._store.forget(name)

    def sync(self, *, wait: bool) -> None:
        self._store.sync(wait=wait)

    def counts(self) -> dict[str, int]:
        return self._store.counts()
