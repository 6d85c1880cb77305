"""Owns carrying out decisions where a page of KV lies on the device or in the host store, not in both.

Prompts are computed in pages of the device while there is room, else on their way to the store; all pages of a sequence
move together. What has room where is decided in core/exclusive and core/residency.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

from sgl_batch.core.admission import Admission, reserve
from sgl_batch.core.exclusive import Rooms, stays_on_device
from sgl_batch.core.page_boundary import State
from sgl_batch.core.page_ledger import PageLedger, pages_for
from sgl_batch.core.rank_agreement import Movable
from sgl_batch.core.residency import pages_to_run
from sgl_batch.core.sequence import Sequence
from sgl_batch.managers.tiered_executor import TieredExecutor


class ExclusiveExecutor(TieredExecutor):
    """A tiered executor whose account for admission is that of both tiers together.

    The device's account has READY sequences as well whose prompts stay there, with the pages to run.
    """

    _rooms: Rooms | None = None
    _stays = False

    def _admission_account(self) -> PageLedger:
        device = self._device_ledger()
        return PageLedger(device.total_pages, device.page_size, overflow_pages=self._tiers.share)

    # What decisions are made from.

    def rooms(self, running: Any) -> Rooms:
        in_store = any(not self.ledger.holds(sequence.sequence_id) for sequence in self.table.ready)
        runners = [self._grown(request) for request in running.reqs]
        grow = sum(pages_to_run(s, self.ledger, self.plan) - self.ledger.held(s.sequence_id) for s in runners)
        room = max(0, self.ledger.free_pages - grow)
        self._rooms = Rooms(device=None if in_store else room, store=self.stored.free)
        return self._rooms

    def foresee(self, state: State) -> None:
        """Prompts that begin alike share nothing: their pages would lie in both tiers."""

    def movable(self, running: Any) -> tuple[list[Movable], list[Movable]]:
        """Those in the store, and of the runners as many as have room there; the others stay."""
        ready, run = super().movable(running)
        free, leaving = self.stored.free, []
        for item in sorted(run, key=lambda item: item.tokens):
            free -= pages_for(item.tokens, self.plan.page_size)
            if free >= 0:
                leaving.append(item)
        return [item for item in ready if not self.ledger.holds(item.sequence.sequence_id)], leaving

    # Prefill.

    def _prefill_units(self, units: tuple[Admission, ...]) -> Any:
        assert self._rooms is not None, "units were chosen for the rooms that there are"
        self._stays = stays_on_device(units, self._rooms, self.admission_ledger, self.plan)
        return super()._prefill_units(units)

    def _admit(self, unit: Admission) -> None:
        reserve(unit, self.admission_ledger, held=0, new=0)

    def _prefill_group(self, requests: list[Any], why: str) -> Any:
        if not self._stays:
            return super()._prefill_group(requests, why)
        self._counters.add("prompts_prefilled_on_device", len(requests))
        for request in requests:
            self.ledger.reserve(request.rid, pages_to_run(self.table[request.rid], self.ledger, self.plan))
        return self._prefill(requests, why)

    def _prefilled_on_device(self, requests: list[Any]) -> None:
        if not self._stays:
            super()._prefilled_on_device(requests)
        self._stays = False

    def _share_prompt(self, leader: Any, follower: Any) -> None:
        """Each choice has references of its own to the prompt's slots, which go when it comes to the device."""
        self._counters.add("prompt_tokens_shared", len(leader.origin_input_ids) - 1)

    # At a boundary.

    def turn_page(self, running: Any, *, others_run: bool = False) -> Any:
        if self._returning and self._lacks_slots(running):
            running = self._await_returning(running)
        return super().turn_page(running, others_run=others_run)

    def _evict(self, sequences: Seq[Sequence]) -> None:
        self._to_store([self.table.request_named(sequence.sequence_id) for sequence in sequences])
        self._counters.add("evictions", len(sequences))

    def _restore(self, sequences: Seq[tuple[Sequence, int]], running: Any) -> Any:
        """Those whose prompts have stayed on the device join at once."""
        away = []
        for sequence, pages in sequences:
            if not self.ledger.holds(sequence.sequence_id):
                away.append((sequence, pages))
                continue
            self.ledger.resize(sequence.sequence_id, pages)
            self._fresh.append(self.table.take_ready(sequence.sequence_id))
        return self.join_returned(super()._restore(away, running))

    def _lacks_slots(self, running: Any) -> bool:
        """Whether those that are to leave the device need slots that are free when those that return are there."""
        turn = self._decide(running)
        leave = sum(pages_for(s.kv_tokens, self.plan.page_size) for s in (*turn.suspend, *turn.evict))
        return leave > self.stored.free
