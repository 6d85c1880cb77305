"""Owns virtual sequences that decode with an exclusive store; each step is checked."""

from __future__ import annotations

from collections.abc import Iterable

from virtual_memory_pressure import VirtualPressure

from sgl_batch.core.admission import reserve
from sgl_batch.core.coroutine import Event, advance
from sgl_batch.core.exclusive import TierCapacity, stays_on_device
from sgl_batch.core.page_boundary import State, prefill_units
from sgl_batch.core.page_ledger import PageLedger, pages_for
from sgl_batch.core.plan import Plan
from sgl_batch.core.residency import Residency, pages_to_run
from sgl_batch.core.sequence import SequenceState


class VirtualTwoTiers(VirtualPressure):
    """A device and a store of some pages, and a queue. `store_blocks`: by sequence, its blocks in the store.

    `to_store`: whether prompts can be computed on their way to the store.
    """

    def __init__(self, pages: int, store_pages: int, plan: Plan, *, restore_steps: int, to_store: bool = True) -> None:
        super().__init__(pages, plan, restore_steps=restore_steps)
        self._to_store = to_store
        self.account = PageLedger(pages, plan.page_size, overflow_pages=store_pages)
        self.store_pages = store_pages
        self.store_blocks: dict[str, int] = {}
        self.queue: list[SequenceState] = []
        self.stayed = self.evicted = self.waits = 0

    def _shared_pages(self, sequence: SequenceState) -> list[tuple[int, int]]:
        return []

    @property
    def busy(self) -> bool:
        return bool(self.queue or self.waiting or self.running or self.restoring)

    def run(self) -> None:
        while self.busy:
            self.interval()

    def _boundary(self) -> None:
        while self._prefill():
            pass
        super()._boundary()

    # Prefill.

    def _prefill(self) -> bool:
        state = State(
            queued=list(self.queue),
            ready=list(self.waiting),
            running=len(self.running),
            steps=0,
            request_slots=99,
            free_request_slots=99,
            filling=True,
            returning=len(self.restoring),
        )
        capacity = self._capacity()
        units = prefill_units(state, self.plan, self.account, capacity)
        stays = bool(units) and stays_on_device(units, capacity, self.account, self.plan)
        assert stays or self._to_store or not units, "prompts that cannot go to the store have room on the device"
        assert [unit.leader for unit in units] == self.queue[: len(units)], "no prompt passes the head of the queue"
        for unit in units:
            assert not unit.followers
            sequence = self.queue.pop(0)
            reserve(unit, self.account, held=0, new=0)
            self.add(sequence)
            if stays:
                self.stayed += 1
                self.ledger.reserve(sequence.sequence_id, pages_to_run(sequence, self.account, self.plan))
            else:
                self._leaves_device(sequence)
        self.operations += len(units)
        return bool(units)

    def _capacity(self) -> TierCapacity:
        in_store = any(not self.ledger.holds(s.sequence_id) for s in self.waiting)
        grow = sum(pages_to_run(s, self.ledger, self.plan) - self.ledger.held(s.sequence_id) for s in self.running)
        device = None if in_store else max(0, self.ledger.free_pages - grow)
        return TierCapacity(device=device, store=self._free_store_blocks, to_store=self._to_store)

    # The tiers.

    @property
    def _free_store_blocks(self) -> int:
        return self.store_pages - sum(self.store_blocks.values())

    def _decide(self) -> Residency:
        """Decide; sequences that need store blocks of copies under way wait for these copies."""
        turn = super()._decide()
        leave = sum(pages_for(s.kv_tokens, self.plan.page_size) for s in (*turn.suspend, *turn.evict))
        if leave > self._free_store_blocks:
            self.waits += 1
            assert self.restoring, "without copies under way enough store blocks are free"
            self._join([s for s, _ in self.restoring])
            turn = super()._decide()
        self.evicted += len(turn.evict)
        return turn

    def _leaves_device(self, sequence: SequenceState) -> None:
        self.store_blocks[sequence.sequence_id] = pages_for(sequence.kv_tokens, self.plan.page_size)

    def _join(self, arrived: Iterable[SequenceState]) -> None:
        arrived = list(arrived)
        super()._join(arrived)
        for sequence in arrived:
            self.store_blocks.pop(sequence.sequence_id, None)

    def _ends(self, sequence: SequenceState) -> None:
        super()._ends(sequence)
        self.account.release(sequence.sequence_id)

    def _conserve(self) -> None:
        super()._conserve()
        assert self._free_store_blocks >= 0, "the store holds no more than its blocks"
        on_device = {s.sequence_id for s in self.running}
        assert not on_device & self.store_blocks.keys(), "a running sequence has nothing in the store"
        for sequence in self.waiting:
            held = self.ledger.holds(sequence.sequence_id)
            assert held is not (sequence.sequence_id in self.store_blocks), "a waiting sequence has its KV in one tier"

    def abort(self, sequence: SequenceState) -> None:
        """Abort a waiting or running sequence."""
        (self.running if sequence in self.running else self.waiting).remove(sequence)
        advance(sequence, Event.ABORT, "test")
        self.store_blocks.pop(sequence.sequence_id, None)
        if self.ledger.holds(sequence.sequence_id):
            self.ledger.release(sequence.sequence_id)
        self._ends(sequence)
