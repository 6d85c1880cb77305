"""Owns a rank's sequences as migration sees them where ranks share a store: they move by their store blocks.

No page is copied to another rank: the receiver takes a reference to the blocks while the sender still holds its own,
and the sequence takes its part of the sender's lease of the store along. A running sequence is suspended first.
core/rank_agreement decides which sequences move.
"""

from __future__ import annotations

import msgspec

from sgl_batch.kv_offload.stored_kv import StoredKV
from sgl_batch.managers.boundary_executor import BoundaryExecutor
from sgl_batch.managers.rank_migration import request_of, written_down
from sgl_batch.migration.header import SequenceHeader
from sgl_batch.migration.store import Export, Refusal, Reservation
from sgl_batch.sglang_adapter.moving_grammars import ArrivingGrammars
from sgl_batch.sglang_adapter.types.batches import ScheduleBatch
from sgl_batch.sglang_adapter.types.requests import Request
from sgl_batch.sglang_adapter.types.scheduler import SGLangScheduler


class StoredSequences:
    """The `SequenceStore` of a scheduler process with a host KV store."""

    def __init__(self, scheduler: SGLangScheduler, executor: BoundaryExecutor, stored: StoredKV) -> None:
        self._scheduler, self._executor, self._stored = scheduler, executor, stored
        assert executor.kv.leased is not None, "the ranks share the store"
        self._table, self._leased = executor.table, executor.kv.leased
        self._pool = scheduler.token_to_kv_pool_allocator.get_kvcache()
        self._grammars = ArrivingGrammars(scheduler)
        self._expected: dict[str, Request] = {}

    def begin(self, leaving: list[str], running: ScheduleBatch) -> None:
        runners = [self._table[name] for name in leaving if self._table.is_running(name)]
        self._executor.suspend(runners, running, "it moves away")

    def export(self, sequence_id: str) -> Export:
        request = self._table.request_named(sequence_id)
        blocks, leased = self._stored.store_blocks_of(sequence_id), self._leased.blocks_with(sequence_id)
        header = written_down(request, self._pool, num_pages=0, store_blocks=blocks)
        turn = self._table[sequence_id].waits_since
        return Export(header=msgspec.structs.replace(header, leased=leased, waits_since=turn), tensors=())

    def reserve(self, header: SequenceHeader) -> Reservation | Refusal:
        request = request_of(header, self._scheduler)
        self._leased.change(header.leased)
        refusal = self._grammars.give(request) or self._table.expect(request, self._executor.plan)
        if refusal is not None:
            self._leased.change(-header.leased)
            return Refusal(reason=refusal)
        self._stored.take_over(header.sequence_id, header.store_blocks, header.position)
        self._expected[header.sequence_id] = request
        return Reservation(tensors=())

    def adopt(self, header: SequenceHeader, reservation: Reservation) -> None:
        self._table.adopt(self._expected.pop(header.sequence_id), header.waits_since)

    def cancel(self, header: SequenceHeader, reservation: Reservation) -> None:
        del self._expected[header.sequence_id]
        self._stored.forget(header.sequence_id)
        self._table.expect_no_more(header.sequence_id)
        self._leased.change(-header.leased)

    def release(self, sequence_id: str) -> None:
        leased = self._leased.blocks_with(sequence_id)
        self._stored.forget(sequence_id)
        self._table.depart(sequence_id)
        self._leased.change(-leased)
