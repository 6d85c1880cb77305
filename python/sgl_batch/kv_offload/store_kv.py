"""Owns the inclusive form: KV is written to the host store as pages fill, and restored for sequences that run.

The ledger of the store holds all that a sequence can need, from its admission on, within this rank's lease. The ledger
of the device holds the pages that running and restoring sequences need until the next boundary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import takewhile

from sgl_batch.core.admission import Admission, reserve
from sgl_batch.core.admission_policy import RESERVE, AdmissionPolicy
from sgl_batch.core.kv_state import KVState
from sgl_batch.core.page_ledger import PageLedger
from sgl_batch.core.plan import Plan
from sgl_batch.core.prefixes import PrefixPage
from sgl_batch.core.resident_prompts import ResidentPrompts
from sgl_batch.kv_offload.device_kv import device_ledger
from sgl_batch.kv_offload.kv_form import Arrived, RankView
from sgl_batch.kv_offload.kv_tiers import KVTiers, Returning
from sgl_batch.kv_offload.prompt_sharing import PromptSharing
from sgl_batch.metrics.counters import Counters
from sgl_batch.sglang_adapter.moving import attach
from sgl_batch.sglang_adapter.scheduling import detach, free_kv, protect_prefix, retract, set_prefix
from sgl_batch.sglang_adapter.types.batches import ScheduleBatch
from sgl_batch.sglang_adapter.types.requests import Request
from sgl_batch.sglang_adapter.types.scheduler import SGLangScheduler


def _blocks_go_with_sequences(pages: list[int]) -> None:
    """Free nothing: every sequence that holds a prompt's page has its own reference to the block."""


class StoreKV:
    """A `KVForm` over an inclusive store: suspending a sequence copies only its open page."""

    def __init__(
        self,
        scheduler: SGLangScheduler,
        counters: Counters,
        tiers: KVTiers,
        admission: AdmissionPolicy = RESERVE,
    ) -> None:
        self._scheduler, self._counters, self.tiers = scheduler, counters, tiers
        self.device = device_ledger(scheduler)
        self.admission = PageLedger(tiers.share, scheduler.page_size, policy=admission, pool_pages=tiers.pool_blocks)
        self.leased = tiers.leased(self.admission)
        self.sharing = PromptSharing(scheduler, counters, _blocks_go_with_sequences)
        self._prompts = ResidentPrompts[PrefixPage]()
        self._returning: list[Returning] = []
        self._ready: dict[str, Request] = {}
        self._is_staged = False

    @property
    def returning(self) -> list[Request]:
        return [returning.request for returning in self._returning]

    def state(self, view: RankView) -> KVState:
        return KVState(
            device=self.device,
            admission=self.admission,
            runners=view.runners,
            estimate_shared=view.estimate_shared,
            prompts=self._prompts,
            pages_of=self.sharing.pages_of,
            choices=view.choices,
            arrived=bool(self._ready) or (bool(self._returning) and self._returning[0].ticket.done),
            interval=view.interval,
        )

    # Prefill, staged to the store layer by layer.

    def match_and_insert(self, unit: Admission, leader: Request, plan: Plan) -> None:
        match = self.sharing.match_and_insert(unit, leader, plan)
        reserve(unit, self.admission, held=len(match.pages), new=len(match.own), plan=plan)

    def prefill(
        self, requests: list[Request], pages: Sequence[int] | None, make_batch: Callable[[], ScheduleBatch]
    ) -> ScheduleBatch:
        assert pages is None, "prompts are staged to the store"
        self._is_staged = True
        matches = [self.sharing.match_of(request) for request in requests]
        with self.tiers.staging():
            where = self.tiers.stage_prefixes(requests, matches)
            batch = make_batch()
        self.sharing.lay_tables(requests, where)
        self.tiers.begin_prefill(requests, matches)
        return batch

    def fork(self, leader: Request, follower: Request) -> bool:
        self.sharing.join(leader, follower)
        self.fork_stored(leader, follower)
        return False

    def fork_stored(self, leader: Request, follower: Request) -> None:
        """Give a choice its leader's prompt, all but the last token, in the same blocks."""
        self.tiers.stored.fork(leader.rid, follower.rid, tokens=len(leader.origin_input_ids) - 1)

    def end_pass(self, batch: ScheduleBatch) -> None:
        if self._is_staged and batch.forward_mode.is_extend():
            with self._counters.clock.part("copies"):
                self.tiers.end_prefill()

    def settle(self, batch: ScheduleBatch, requests: list[Request]) -> None:
        if self.left_device(batch, requests):
            return
        with self._counters.clock.part("copies"):
            self.tiers.write_through(requests)
        if batch.forward_mode.is_extend():
            self.run_on(requests)

    def left_device(self, batch: ScheduleBatch, requests: list[Request]) -> bool:
        """Detach these requests after a staged prefill, whose KV is in the store now. Returns whether it was one."""
        if not (self._is_staged and batch.forward_mode.is_extend()):
            return False
        self._is_staged = False
        for request in requests:
            detach(self._scheduler, request)
        return True

    def run_on(self, requests: list[Request]) -> None:
        """Let choices run from the next step on: the last token of their prompts is computed on the device."""
        self._ready.update({request.rid: request for request in requests})

    # Between the tiers.

    def to_store(self, requests: list[Request]) -> None:
        if not requests:
            return
        with self._counters.clock.part("copies"):
            self.tiers.suspend(requests)
            for request in requests:
                free_kv(self._scheduler, request)
                detach(self._scheduler, request)
                self.device.release(request.rid)
                self._leave_device(request.rid)

    def restore(self, request: Request) -> None:
        prompt = self.sharing.pages_of(request.rid)
        with self._counters.clock.part("copies"):
            self.device.add_prompt_pages(len(self._prompts.lacking(prompt)))
            self._prompts.enter(request.rid, prompt)
            self._returning.append(self.tiers.restore(request, prompt))

    def arrived(self, *, wait: bool) -> Arrived:
        """As KVForm. A request waits for all restored before it, whose pages it may share."""
        came = self._returning if wait else list(takewhile(lambda one: one.ticket.done, self._returning))
        self._returning = self._returning[len(came) :]
        ready, self._ready = self._ready, {}
        found = Arrived(ready=list(ready.values()))
        if came:
            with self._counters.clock.part("copies"):
                for returning in came:
                    self._take_in(returning, found)
        return found

    def _take_in(self, returning: Returning, found: Arrived) -> None:
        returning.ticket.wait()
        request, kv_indices = returning.request, self.tiers.token_indices_of(returning.request.rid, returning.pages)
        shared = len(self.sharing.pages_of(request.rid)) * self.device.page_size
        self.tiers.stored.restored(request.rid)
        if request.output_ids:
            attach(self._scheduler, request, kv_indices)
            protect_prefix(request, shared)
            found.runners.append(request)
        else:
            set_prefix(request, self._scheduler, kv_indices, shared)
            found.choices.append(request)

    def prepare_to_run(self, requests: list[Request]) -> None:
        """Do nothing: their KV is on the device."""

    # Decode.

    def step(self, running: ScheduleBatch, plan: Plan) -> None:
        running.prepare_for_decode()

    def stream(self, *, on: bool) -> None:
        raise AssertionError("this form keeps running KV on the device")

    # The end of a sequence.

    def give_up(self, request: Request) -> None:
        retract(self._scheduler, request)
        self.forget(request.rid)

    def forget(self, name: str) -> None:
        self._ready.pop(name, None)
        self.tiers.stored.forget(name)
        self._leave_device(name)

    def _leave_device(self, name: str) -> None:
        """Free the pages of a sequence's prompt that no other sequence on the device has."""
        dropped = self._prompts.leave(name)
        if dropped:
            self.tiers.drop(dropped)
            self.device.add_prompt_pages(-len(dropped))

    def sync(self, *, wait: bool) -> None:
        self.tiers.stored.sync(wait=wait)

    def counts(self) -> dict[str, int]:
        return self.tiers.store_state()
