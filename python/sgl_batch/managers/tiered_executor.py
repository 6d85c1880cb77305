"""Owns carrying out decisions where KV waits in the host store: staged prefill, suspending, restoring, write-through.

It decides nothing itself: who keeps device pages is decided in core/residency.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import replace
from itertools import takewhile
from typing import Any

from sgl_batch.core.coroutine import Event
from sgl_batch.core.page_boundary import PrefillGroup, State, boundary_due, prefill_units, prefill_wanted
from sgl_batch.core.page_ledger import PageLedger
from sgl_batch.core.plan import Plan
from sgl_batch.core.prefixes import PrefixPage
from sgl_batch.core.primitives import combine
from sgl_batch.core.residency import Residency, ResidentPrompts, decide_residency
from sgl_batch.core.sequence import Sequence
from sgl_batch.managers.boundary_executor import BoundaryExecutor
from sgl_batch.managers.kv_tiers import KVTiers, Returning
from sgl_batch.managers.sequence_table import SequenceTable
from sgl_batch.managers.stored_kv import StoredKV
from sgl_batch.managers.trace import TraceWriter
from sgl_batch.model_executor.counters import Counters
from sgl_batch.sglang_adapter.moving import take_in, without
from sgl_batch.sglang_adapter.scheduling import (
    decode_batches,
    detach,
    empty,
    end_aborted,
    end_detached,
    free_slots,
    give_prefix,
    mark_aborted,
    merge_into,
    protect_prefix,
)


class TieredExecutor(BoundaryExecutor):
    """A boundary executor over two tiers. The store's account holds all that a sequence can need, from admission on;
    of a store that ranks share it has this rank's share.

    The device's account holds what runners need until the next boundary, and what is on its way back to the device.
    """

    def __init__(self, scheduler: Any, plan: Plan, counters: Counters, trace: TraceWriter, tiers: KVTiers) -> None:
        self._tiers = tiers
        super().__init__(scheduler, plan, counters, trace)
        self._returning: list[Returning] = []
        self._arrived_forks: list[Any] = []
        self._fresh: list[Any] = []
        self._staged = False
        self._prompts = ResidentPrompts[PrefixPage]()

    def _make_table(self, trace: TraceWriter) -> SequenceTable:
        return SequenceTable(
            self._device_ledger(), self._sharing, self._counters, trace, store_ledger=self._admission_account()
        )

    def _admission_account(self) -> PageLedger:
        """An empty account of all that admitted sequences can need."""
        return PageLedger(self._tiers.share, self.plan.page_size)

    @property
    def admission_ledger(self) -> PageLedger:
        assert self.table.store_ledger is not None, "there is a store"
        return self.table.store_ledger

    @property
    def stored(self) -> StoredKV:
        """The slots of this rank's sequences."""
        return self._tiers.stored

    def store_state(self) -> dict[str, int]:
        if self.is_empty:  # who has asked because all answers are there finds all slots free
            self.sync()
        return self._tiers.store_state()

    def state(self, running: Any) -> State:
        return replace(super().state(running), returning=len(self._returning))

    @property
    def num_forked(self) -> int:
        return len(self._arrived_forks)

    def sync(self) -> None:
        """Nobody else comes by to free the slots of those that have ended."""
        self._tiers.stored.sync(wait=True)

    # Decide, then do.

    def next_batch(self, running: Any) -> tuple[Any | None, Any]:
        running = self.join_returned(running)
        if self._arrived_forks:
            return self.fork_batch(), running
        state = self.state(running)
        if boundary_due(state, self.plan):
            if prefill_wanted(state, self.plan):
                self.foresee(state)
            group = prefill_units(state, self.plan, self.admission_ledger, self._order, self.rooms(running))
            if group:
                return self.prefill(PrefillGroup(units=tuple(group))), running
            running = self.turn_page(running)
            if self._arrived_forks:
                return self.fork_batch(), running
            if not running.reqs:
                self._filling = False
                self.sync()
                return None, running
        return self.decode_step(running), running

    def goes_on(self, running: Any) -> bool:
        """Nobody joins: who comes back does it when all results are in."""
        arrived = bool(self._returning) and self._returning[0].ticket.done
        return not (arrived or self._fresh) and super().goes_on(running)

    def turn_page(self, running: Any, *, others_run: bool = False) -> Any:
        """Sync, Evict, Extend, Refill; where nobody can run, on other ranks neither, wait for whoever comes back."""
        self.stored.sync(wait=False)
        turn = self._decide(running)
        self._suspend(turn.suspend, running, "pages of the device lack")
        self._evict(turn.evict)
        for sequence, pages in turn.extend:
            self.ledger.resize(sequence.sequence_id, pages)
        running = self._restore(turn.restore, running)
        if self._returning and not (running.reqs or others_run):
            running = self._await_returning(running)
        self.begin_page()
        return running

    def _decide(self, running: Any) -> Residency:
        sequences = [self._grown(request) for request in running.reqs]
        return decide_residency(
            sequences,
            self.table.ready,
            self.ledger,
            self.plan,
            prompts=self._prompts,
            pages_of=self._sharing.pages_of,
            restoring=len(self._returning),
        )

    def _await_returning(self, running: Any) -> Any:
        with self._counters.clock.part("copies"):
            for returning in self._returning:
                returning.ticket.wait()
        return self.join_returned(running)

    def _grown(self, request: Any) -> Sequence:
        sequence = self.table[request.rid]
        sequence.generated_tokens = len(request.output_ids)
        return sequence

    def leave_device(self, names: list[str], running: Any) -> None:
        """Suspend those of these sequences that run: all KV of each is in the store when this returns."""
        self._suspend([self.table[name] for name in names if self.table.is_running(name)], running, "it moves away")

    def _suspend(self, sequences: Seq[Sequence], running: Any, why: str) -> None:
        if not sequences:
            return
        requests = [self.table.request_named(sequence.sequence_id) for sequence in sequences]
        for request in requests:
            self._grown(request)
            without(running, request)
        self._to_store(requests)
        self.table.record([self.table.suspended(request.rid, why) for request in requests])
        self._counters.add("suspensions", len(requests))

    def _to_store(self, requests: list[Any]) -> None:
        """Their KV leaves the device; it is all in the store when this returns."""
        if not requests:
            return
        with self._counters.clock.part("copies"):
            self._tiers.suspend(requests)
            for request in requests:
                free_slots(self._scheduler, request)
                detach(self._scheduler, request)
                self.ledger.release(request.rid)
                self._leave_device(request.rid)

    def _leave_device(self, name: str) -> None:
        """A sequence runs no more: pages of its prompt go that nobody else on the device has."""
        dropped = self._prompts.leave(name)
        if dropped:
            self._tiers.drop(dropped)
            self.ledger.add_prompt_pages(-len(dropped))

    def _take_out(self, running: Any) -> list[Any]:
        joined = self._await_returning(running)
        forks, self._arrived_forks = self._arrived_forks, []
        found = super()._take_out(joined)
        empty(running)  # where it was empty, those that came back are another batch
        return found + forks

    def _give_up_kv(self, request: Any) -> None:
        super()._give_up_kv(request)
        self._tiers.stored.forget(request.rid)
        self._leave_device(request.rid)

    def _evict(self, sequences: Seq[Sequence]) -> None:
        assert not sequences, "whoever waits has no pages of the device"

    def _restore(self, sequences: Seq[tuple[Sequence, int]], running: Any) -> Any:
        """Bring sequences back, for each of which so many pages are free; returns the decode batch."""
        with self._counters.clock.part("copies"):
            for sequence, pages in sequences:
                self.ledger.reserve(sequence.sequence_id, pages)
                request = self.table.take_ready(sequence.sequence_id)
                prompt = self._sharing.pages_of(sequence.sequence_id)
                self.ledger.add_prompt_pages(len(self._prompts.lacking(prompt)))
                self._prompts.enter(sequence.sequence_id, prompt)
                self._returning.append(self._tiers.restore(request, prompt))
        return running

    def join_returned(self, running: Any) -> Any:
        """The decode batch with those whose KV has come back, and that of all before them, which they may share."""
        arrived = list(takewhile(lambda returning: returning.ticket.done, self._returning))
        requests, self._fresh = self._fresh, []
        if not arrived and not requests:
            return running
        self._returning = self._returning[len(arrived) :]
        with self._counters.clock.part("copies"):
            for returning in arrived:
                returning.ticket.wait()
                request, slots = returning.request, self._tiers.slots_of(returning.request.rid, returning.pages)
                shared = len(self._sharing.pages_of(request.rid)) * self.plan.page_size
                self._tiers.stored.restored(request.rid)
                if request.output_ids:
                    take_in(self._scheduler, request, slots)
                    protect_prefix(request, shared)
                    requests.append(request)
                else:
                    give_prefix(request, self._scheduler, slots, shared)
                    self._arrived_forks.append(request)
            for joining in decode_batches(self._scheduler, requests):
                running = merge_into(running, joining)
        sequences = [self.table[request.rid] for request in requests]
        self.table.record(combine(sequences, Event.COMBINE_DECODE, "its KV is back on the device"))
        self._changes_at_boundary = self.table.changes
        return running

    # Choices of one prompt.

    def before_prefill_results(self, batch: Any) -> None:
        """Choices fork when their leader's prompt is in the store, which is after the results."""

    def _free_places(self, pages: list[int]) -> None:
        """Slots go with the sequences that refer to them."""

    def _fork(self, leader: Any, followers: list[Any]) -> None:
        for follower in followers:
            self._share_prompt(leader, follower)
            self._tiers.stored.fork(leader.rid, follower.rid, tokens=len(leader.origin_input_ids) - 1)
            self.table.forked(follower.rid)

    def _share_prompt(self, leader: Any, follower: Any) -> None:
        """A choice has its leader's prompt, but for the last token."""
        self._sharing.join(leader, follower)

    def fork_batch(self) -> Any:
        """The prefill of choices whose KV has come to the device: their prompts' last tokens."""
        limit = self.plan.prefill.b_moe
        taken, self._arrived_forks = self._arrived_forks[:limit], self._arrived_forks[limit:]
        return self._prefill(taken, "its prompt was computed by its leader")

    # Prefill, layer by layer to the store.

    def _prefill_group(self, requests: list[Any], why: str) -> Any:
        self._staged = True
        holds = [self._sharing.hold_of(request) for request in requests]
        with self._tiers.staging():
            where = self._tiers.stage_prefixes(holds)
            batch = self._prefill(requests, why)
        self._sharing.lay_tables(requests, where)
        self._tiers.begin_prefill(requests, holds)
        return batch

    def after_results(self, batch: Any, requests: list[Any]) -> None:
        names, prefilled, staged = [r.rid for r in requests], batch.forward_mode.is_extend(), self._staged
        if staged:
            with self._counters.clock.part("copies"):
                self._tiers.end_prefill()
            super().before_prefill_results(batch)
            self._staged = False
        super().after_results(batch, requests)
        for name in names:
            if name not in self.table:
                self._tiers.stored.forget(name)
                self._leave_device(name)
        left = [request for request in requests if not request.finished()]
        if staged:
            for request in left:
                detach(self._scheduler, request)
            return
        self._write_through(left)
        if prefilled:
            self._prefilled_on_device(left)

    def _write_through(self, requests: list[Any]) -> None:
        """Pages that requests have filled leave for the store."""
        with self._counters.clock.part("copies"):
            self._tiers.write_through(requests)

    def _prefilled_on_device(self, requests: list[Any]) -> None:
        """Choices have computed the last token of their prompts, and run from the next step on."""
        self._fresh += [self.table.take_ready(request.rid) for request in requests]

    def abort_outside_batches(self, is_meant: Callable[[str], bool]) -> None:
        for name in [s.sequence_id for s in self.table.ready if is_meant(s.sequence_id)]:
            request = self.table.take_ready(name)
            end = end_aborted if self.ledger.holds(name) else end_detached
            end(self._scheduler, request)
            self.table.record([self.table.finish(request)])
            self._tiers.stored.forget(name)
        held = [*(returning.request for returning in self._returning), *self._arrived_forks, *self._fresh]
        for request in [*held, *(request for forks in self._forks.values() for request in forks)]:
            if is_meant(request.rid):
                mark_aborted(request)
