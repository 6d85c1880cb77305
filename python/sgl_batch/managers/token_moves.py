"""Owns moves without KV: a sequence leaves with its tokens alone, and is queued to be prefilled where it arrives.

core/rank_moves decides which sequences move so: queued ones, and those whose KV is computed sooner than it is sent.
"""

from __future__ import annotations

from collections.abc import Collection

from msgspec.structs import replace

from sgl_batch.core.sequence import Status
from sgl_batch.managers.boundary_executor import BoundaryExecutor
from sgl_batch.managers.rank_migration import MovingSequences, request_of, written_down
from sgl_batch.metrics.counters import Counters
from sgl_batch.migration.header import SequenceHeader
from sgl_batch.migration.store import Export, Refusal, Reservation
from sgl_batch.sglang_adapter import moving
from sgl_batch.sglang_adapter.moving_grammars import ArrivingGrammars
from sgl_batch.sglang_adapter.types.batches import ScheduleBatch
from sgl_batch.sglang_adapter.types.requests import Request
from sgl_batch.sglang_adapter.types.scheduler import SGLangScheduler


class TokenMoves:
    """A `MovingSequences` over another one, which moves those that leave with their KV.

    `sent_tokens`: of how many tokens KV was exported since it was last set to 0.
    """

    def __init__(
        self, with_kv: MovingSequences, scheduler: SGLangScheduler, executor: BoundaryExecutor, counters: Counters
    ) -> None:
        self._with_kv, self._scheduler, self._executor, self._counters = with_kv, scheduler, executor, counters
        self._table, self._pool = executor.table, scheduler.token_to_kv_pool_allocator.get_kvcache()
        self._grammars = ArrivingGrammars(scheduler)
        self._leaving: frozenset[str] = frozenset()
        self._expected: dict[str, Request] = {}
        self.sent_tokens = 0

    def prepare(self, as_tokens: Collection[str]) -> None:
        """Note which of the sequences that leave at this boundary leave without KV."""
        self._leaving = frozenset(as_tokens)

    def begin(self, leaving: list[str], running: ScheduleBatch) -> None:
        self._with_kv.begin([name for name in leaving if name not in self._leaving], running)

    def export(self, sequence_id: str) -> Export:
        if sequence_id not in self._leaving:
            export = self._with_kv.export(sequence_id)
            self.sent_tokens += export.header.position
            return export
        request, sequence = self._table.request_named(sequence_id), self._table[sequence_id]
        lost = sequence.lost_tokens if sequence.status is Status.QUEUED else request.kv_committed_len
        header = written_down(request, self._pool, num_pages=0, store_blocks=[])
        return Export(header=replace(header, position=0, as_tokens=True, lost_tokens=lost), tensors=())

    def reserve(self, header: SequenceHeader) -> Reservation | Refusal:
        if not header.as_tokens:
            return self._with_kv.reserve(header)
        request = request_of(header, self._scheduler)
        if (refusal := self._grammars.give(request)) is not None:
            return Refusal(reason=refusal)
        self._expected[header.sequence_id] = request
        return Reservation(tensors=())

    def adopt(self, header: SequenceHeader, reservation: Reservation) -> None:
        if not header.as_tokens:
            self._with_kv.adopt(header, reservation)
            return
        request = self._expected.pop(header.sequence_id)
        moving.queue(self._scheduler, request)
        self._executor.enqueue(request)
        self._table[header.sequence_id].lost_tokens = header.lost_tokens
        self._counters.add("sequences_arrived")
        self._counters.add("sequences_moved_as_tokens")

    def cancel(self, header: SequenceHeader, reservation: Reservation) -> None:
        if header.as_tokens:
            del self._expected[header.sequence_id]
        else:
            self._with_kv.cancel(header, reservation)

    def release(self, sequence_id: str) -> None:
        if self._table[sequence_id].status is Status.QUEUED:
            self._executor.removal.leave_queue(sequence_id)
            self._table.depart(sequence_id)
        else:
            self._with_kv.release(sequence_id)
