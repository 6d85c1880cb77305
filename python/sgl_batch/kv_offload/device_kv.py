"""Owns the form without a store: a sequence has the device pages that it has reserved, until it ends."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from sgl_batch.core.admission import Admission, reserve
from sgl_batch.core.admission_policy import RESERVE, AdmissionPolicy
from sgl_batch.core.kv_state import KVState
from sgl_batch.core.page_ledger import PageLedger
from sgl_batch.core.plan import Plan
from sgl_batch.kv_offload.kv_form import Arrived, RankView
from sgl_batch.kv_offload.leased_store import LeasedStore
from sgl_batch.kv_offload.prompt_sharing import PromptSharing
from sgl_batch.metrics.counters import Counters
from sgl_batch.sglang_adapter.scheduling import retract
from sgl_batch.sglang_adapter.types.batches import ScheduleBatch
from sgl_batch.sglang_adapter.types.requests import Request
from sgl_batch.sglang_adapter.types.scheduler import SGLangScheduler


def device_ledger(scheduler: SGLangScheduler, admission: AdmissionPolicy = RESERVE) -> PageLedger:
    """Return an empty ledger of the pages of the scheduler's pool. `admission`: if sequences are admitted by it."""
    size = scheduler.page_size
    return PageLedger(scheduler.token_to_kv_pool_allocator.size // size, size, policy=admission)


class DeviceKV:
    """A `KVForm` without a store. A shared page is freed with the last sequence that holds it."""

    returning: Sequence[Request] = ()
    leased: LeasedStore | None = None

    def __init__(self, scheduler: SGLangScheduler, counters: Counters, admission: AdmissionPolicy = RESERVE) -> None:
        self._scheduler = scheduler
        self.device = self.admission = device_ledger(scheduler, admission)
        self.sharing = PromptSharing(scheduler, counters, self._free_pages)

    def _free_pages(self, pages: list[int]) -> None:
        kv_indices = torch.tensor(pages, device=self._scheduler.device) * self.device.page_size
        self._scheduler.token_to_kv_pool_allocator.free(kv_indices)

    def state(self, view: RankView) -> KVState:
        return KVState(
            device=self.device, admission=self.admission, runners=view.runners, estimate_shared=view.estimate_shared
        )

    def match_and_insert(self, unit: Admission, leader: Request, plan: Plan) -> None:
        match = self.sharing.match_and_insert(unit, leader, plan)
        reserve(unit, self.admission, held=len(match.pages), new=len(match.own), plan=plan)

    def prefill(
        self, requests: list[Request], pages: Sequence[int] | None, make_batch: Callable[[], ScheduleBatch]
    ) -> ScheduleBatch:
        batch = make_batch()
        self.sharing.settle(requests)
        return batch

    def fork(self, leader: Request, follower: Request) -> bool:
        self.sharing.fork(leader, [follower])
        return True

    def end_pass(self, batch: ScheduleBatch) -> None:
        """Do nothing: no copies ran during the pass."""

    def settle(self, batch: ScheduleBatch, requests: list[Request]) -> None:
        """Do nothing: KV stays where the pass wrote it."""

    def to_store(self, requests: list[Request]) -> None:
        raise AssertionError("without a store nothing is suspended")

    def restore(self, request: Request) -> None:
        raise AssertionError("without a store nothing is restored")

    def arrived(self, *, wait: bool) -> Arrived:
        return Arrived()

    def prepare_to_run(self, requests: list[Request]) -> None:
        """Do nothing: they decode in the pages of their prompts."""

    def step(self, running: ScheduleBatch, plan: Plan) -> None:
        running.prepare_for_decode()

    def stream(self, *, on: bool) -> None:
        raise AssertionError("there is no store to stream from")

    def give_up(self, request: Request) -> None:
        retract(self._scheduler, request)

    def forget(self, name: str) -> None:
        """Do nothing: its request has freed its pages, and the ledger its reservation."""

    def sync(self, *, wait: bool) -> None:
        """Do nothing: there are no copies."""

    def counts(self) -> dict[str, int]:
        return {}
