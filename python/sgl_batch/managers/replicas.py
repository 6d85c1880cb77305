"""Owns a rank's store of sequences for replication: what is sent stays, and what arrives is a replica.

core/partition decides which sequences are replicated, and `rank_partition` whether their replicas run.
"""

from __future__ import annotations

from sgl_batch.core.plan import Plan
from sgl_batch.managers.boundary_executor import BoundaryExecutor
from sgl_batch.managers.rank_migration import RankSequences
from sgl_batch.managers.sequence_table import SequenceTable
from sgl_batch.metrics.counters import Counters
from sgl_batch.migration.header import SequenceHeader
from sgl_batch.migration.store import Export, Refusal, Reservation
from sgl_batch.sglang_adapter.types.requests import Request
from sgl_batch.sglang_adapter.types.scheduler import SGLangScheduler


class ReplicaStore:
    """The `SequenceStore` of a `Migrator` that makes copies, whose pages lie on the device.

    Beside a host store an owner's pages go there as before; a replica has none in it.
    """

    def __init__(self, scheduler: SGLangScheduler, executor: BoundaryExecutor, counters: Counters) -> None:
        self._sequences = RankSequences(scheduler, executor, arrivals=_ArrivingReplicas(executor.table))
        self._counters = counters

    def export(self, sequence_id: str) -> Export:
        return self._sequences.export(sequence_id)

    def reserve(self, header: SequenceHeader) -> Reservation | Refusal:
        return self._sequences.reserve(header)

    def adopt(self, header: SequenceHeader, reservation: Reservation) -> None:
        self._sequences.adopt(header, reservation)
        self._counters.add("replicas_made")
        self._counters.add("replica_bytes", sum(tensor.nbytes for tensor in reservation.tensors))

    def cancel(self, header: SequenceHeader, reservation: Reservation) -> None:
        self._sequences.cancel(header, reservation)

    def release(self, sequence_id: str) -> None:
        """Keep the sequence: another rank has a replica of it."""


class _ArrivingReplicas:
    """The `Arrivals` of replicas."""

    def __init__(self, table: SequenceTable) -> None:
        self._table = table

    def expect(self, request: Request, plan: Plan) -> str | None:
        return self._table.expect_replica(request)

    def expect_no_more(self, name: str) -> None:
        self._table.expect_no_replica(name)

    def adopt(self, request: Request) -> None:
        self._table.adopt_replica(request)
