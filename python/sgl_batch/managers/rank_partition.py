"""Owns carrying out partitions on a rank: replicas of sequences are made, join the decode batch, and are dropped.

core/partition has the theory, and decides when. While a set of ranks is partitioned, each rank of it runs the same
decode batch, row by row.

Making replicas uses the protocol of migration, with a store whose sender keeps what it sends. So a sequence has one
owner at every moment, whichever rank ends: replicas are not owned, and an owner needs none. Copying begins when all
owners have reserved what their sequences can need. When all copies have been made or refused, the ranks agree on
whether all replicas are there. If any is missing, those that were made are dropped, and the sequences run on as before.
A rank that fails meanwhile ends the engine, as with a migration.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence

from sgl_batch.core.rank_moves import Move
from sgl_batch.distributed.group_transport import GroupTransport
from sgl_batch.distributed.rank_context import RankContext
from sgl_batch.managers.boundary_executor import BoundaryExecutor
from sgl_batch.managers.rank_messages import PartitionRow
from sgl_batch.managers.rank_prompts import PromptMessage, RankPrompts
from sgl_batch.managers.replicas import ReplicaStore
from sgl_batch.metrics.counters import Counters
from sgl_batch.migration import messages, migrator
from sgl_batch.migration.endpoints import Endpoints
from sgl_batch.migration.outcome import Result
from sgl_batch.sglang_adapter import moving
from sgl_batch.sglang_adapter.scheduling import clear_batch, decode_batches, merge_into, silence
from sgl_batch.sglang_adapter.types.batches import ScheduleBatch
from sgl_batch.sglang_adapter.types.scheduler import SGLangScheduler

# The heartbeat ends a wait for a rank that hangs long before.
_STEP_TIMEOUT_S = 1800.0
_MADE = frozenset({Result.ADOPTED, Result.RELEASED})


class RankPartition:
    """One rank's part in partitions.

    `all_done`: the agreement of all ranks, as `RankGroup.all_done`. `prompts`: its part in those of a prompt.
    """

    def __init__(
        self,
        scheduler: SGLangScheduler,
        executor: BoundaryExecutor,
        copies: migrator.Migrator,
        all_done: Callable[[bool], bool],
        counters: Counters,
        rank: int,
        prompts: RankPrompts,
    ) -> None:
        self.prompts = prompts
        self._scheduler, self._executor, self._table = scheduler, executor, executor.table
        self._copies, self._all_done, self._counters, self._rank = copies, all_done, counters, rank
        self._boundary = 0

    @property
    def ranks(self) -> frozenset[int]:
        """The set of ranks that this rank is partitioned with now; empty if it is not."""
        return self._table.partition

    @property
    def num_replicas(self) -> int:
        """The number of sequences in the decode batch that other ranks own."""
        return self._table.num_replicas

    def begin(self, partitions: Sequence[PartitionRow], running: ScheduleBatch) -> ScheduleBatch:
        """Begin these partitions, as all ranks do, or none of them; return the decode batch from now on.

        A rank without a part in them takes part in the agreement. Raises MigrationFailed when a rank failed.
        """
        own = next((one for one in partitions if self._rank in one.ranks), None)
        names = [] if own is None else own.sequence_ids
        began = time.perf_counter()
        fits = self._table.reserve_whole(name for name in names if name in self._table)
        stands = self._all_done(fits) and self._all_done(self._copy(partitions))
        if own is None:
            return running
        self._counters.add("replication_us", round((time.perf_counter() - began) * 1e6))
        self._counters.add("partitions" if stands else "partitions_undone", int(self._rank == min(own.ranks)))
        if stands:
            return self._combine(own, running)
        self._drop([name for name in names if self._table.is_replica(name)])
        return running

    def end(self, running: ScheduleBatch) -> ScheduleBatch:
        """Drop this rank's replicas, and return the decode batch, with the sequences that this rank owns."""
        replicas = [request.rid for request in running.reqs if self._table.is_replica(request.rid)]
        running.filter_batch(
            keep_indices=[row for row, request in enumerate(running.reqs) if not self._table.is_replica(request.rid)]
        )
        self._drop(replicas)
        self._table.end_partition()
        return running

    def _copy(self, partitions: Iterable[PartitionRow]) -> bool:
        """Make this rank's copies of all partitions; return whether none was refused."""
        copies = [
            Move(sequence_id=name, source=owner, target=target)
            for partition in partitions
            for name, owner in zip(partition.sequence_ids, partition.owners, strict=True)
            for target in partition.ranks
            if target != owner
        ]
        self._boundary += 1
        report = self._copies.run(self._boundary, copies)
        return all(outcome.result in _MADE for outcome in report.outcomes)

    def _combine(self, own: PartitionRow, running: ScheduleBatch) -> ScheduleBatch:
        """Make the decode batch of the set, whose rows are in the same order on every rank of it."""
        assert {request.rid for request in running.reqs} <= set(own.sequence_ids), "a set runs nothing else"
        self._table.begin_partition(own.sequence_ids, frozenset(own.ranks))
        requests = [self._table.request_named(name) for name in own.sequence_ids]
        clear_batch(running)
        for joining in decode_batches(self._scheduler, requests):
            running = merge_into(running, joining)
        return running

    def _drop(self, names: Iterable[str]) -> None:
        for name in names:
            moving.release(self._scheduler, self._table.request_named(name))
            self._table.drop_replica(name)


def make_partition(
    scheduler: SGLangScheduler,
    executor: BoundaryExecutor,
    rank_context: RankContext,
    all_done: Callable[[bool], bool],
    counters: Counters,
) -> RankPartition:
    """Connect to the other ranks for copies, and return this rank's part. Every rank calls this."""
    silence(scheduler, executor.table.is_replica)
    backend = rank_context.backend(scheduler.device)
    group = rank_context.process_group("replicas", backend)
    ends = Endpoints(
        channel=rank_context.channel("replication", messages.Message),
        transport=GroupTransport(group, range(rank_context.topology.num_ranks), through_host=backend == "gloo"),
        store=ReplicaStore(scheduler, executor, counters),
        step_timeout_s=_STEP_TIMEOUT_S,
    )
    copies = migrator.Migrator(ends, copies=True)
    channel = rank_context.channel("prompts", PromptMessage)
    prompts = RankPrompts(scheduler, executor.table, channel, all_done, counters)
    return RankPartition(scheduler, executor, copies, all_done, counters, rank_context.rank, prompts)
