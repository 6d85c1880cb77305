"""A rank's part in a partition: all its replicas stay, or none; silence; and the order of rows is that of the set."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
from scheduler_stand_ins import request
from test_sequence_table import NoSharing, ended, make_running

from sgl_batch.core.page_ledger import PageLedger
from sgl_batch.core.rank_moves import Move
from sgl_batch.managers import rank_partition
from sgl_batch.managers.rank_messages import PartitionRow
from sgl_batch.managers.rank_partition import RankPartition
from sgl_batch.managers.sequence_table import SequenceTable
from sgl_batch.managers.trace import TraceWriter
from sgl_batch.metrics.counters import Counters
from sgl_batch.migration.outcome import Outcome, Report, Result
from sgl_batch.sglang_adapter.scheduling import silence

# Rank 0 owns r0 and r1, rank 1 owns r2. Rank 2 has no part.
ROW = PartitionRow(["r0", "r1", "r2"], [0, 0, 1], [0, 1])


@dataclass(frozen=True)
class Processor:
    """SGLang's processor of results: a frozen dataclass with the streamer."""

    output_streamer: Any


class Batch:
    """The decode batch: its requests."""

    def __init__(self, reqs: list[SimpleNamespace]) -> None:
        self.reqs = reqs

    def is_empty(self) -> bool:
        return not self.reqs

    def filter_batch(self, *, keep_indices: list[int]) -> None:
        self.reqs = [self.reqs[row] for row in keep_indices]

    def merge_batch(self, other: Batch) -> None:
        self.reqs = self.reqs + other.reqs


class Copies:
    """Stands in for the `Migrator` of one rank: replicas of `refused` are not adopted here."""

    def __init__(self, rank: int, table: SequenceTable, refused: tuple[str, ...]) -> None:
        self._rank, self._table, self._refused = rank, table, refused
        self.runs: list[tuple[int, list[Move]]] = []

    def run(self, boundary: int, moves: list[Move]) -> Report:
        self.runs.append((boundary, moves))
        outcomes = []
        for move in moves:
            if move.source == self._rank:
                outcomes.append(Outcome(sequence_id=move.sequence_id, peer=move.target, result=Result.RELEASED))
            elif move.target == self._rank:
                outcomes.append(Outcome(sequence_id=move.sequence_id, peer=move.source, result=self._adopt(move)))
        return Report(outcomes=tuple(outcomes))

    def _adopt(self, move: Move) -> Result:
        if move.sequence_id in self._refused:
            return Result.NOT_ADOPTED
        replica = request(int(move.sequence_id[1:]))
        assert self._table.expect_replica(replica) is None
        self._table.adopt_replica(replica)
        return Result.ADOPTED


class OneRank:
    """One rank with its running sequences. `agreed` has what it told the others."""

    def __init__(
        self, rank: int, owned: list[int], *, refused: tuple[str, ...] = (), verdicts: Sequence[bool] = (True, True)
    ) -> None:
        left = list(verdicts)
        self.counters, self.agreed = Counters(), list[bool]()
        self.table = SequenceTable(PageLedger(20, 64), NoSharing(), self.counters, TraceWriter(None), rank=rank)
        requests = [request(number) for number in owned]
        make_running(self.table, *requests)
        self.running = Batch(requests)
        self.copies = Copies(rank, self.table, refused)

        def all_done(done: bool) -> bool:
            self.agreed.append(done)
            return left.pop(0)

        executor = SimpleNamespace(table=self.table)
        self.partition = RankPartition(None, executor, self.copies, all_done, self.counters, rank, prompts=None)

    def rows(self) -> list[str]:
        return [one.rid for one in self.running.reqs]

    def begin(self) -> None:
        self.running = self.partition.begin([ROW], self.running)


@pytest.fixture(autouse=True)
def released(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the requests whose KV was released, and let batches be lists of requests."""
    found: list[str] = []
    monkeypatch.setattr(rank_partition.moving, "release", lambda scheduler, one: found.append(one.rid))
    monkeypatch.setattr(rank_partition, "decode_batches", lambda scheduler, requests: [Batch(list(requests))])
    return found


@pytest.mark.parametrize(("rank", "owned"), [(0, [0, 1]), (1, [2])])
def test_all_ranks_of_a_set_run_the_same_rows_in_the_same_order(rank, owned, released):
    one = OneRank(rank, owned)
    one.begin()
    assert one.rows() == ["r0", "r1", "r2"]
    assert (one.partition.ranks, one.partition.num_replicas) == ({0, 1}, 3 - len(owned))
    assert (one.counters.counts["partitions"], released) == (int(rank == 0), []), "one rank counts the partition"
    one.running = one.partition.end(one.running)
    assert one.rows() == [f"r{number}" for number in owned]
    assert released == [f"r{number}" for number in range(3) if number not in owned]
    assert (one.partition.ranks, one.table.num_sequences) == (frozenset(), len(owned))
    assert one.table.ledger.free_pages == 20 - 2 * len(owned)


@pytest.mark.parametrize(
    ("refused", "verdicts"), [(("r1",), [True, False]), ((), [True, False])], ids=["here", "on another rank"]
)
def test_without_one_replica_none_stays_and_the_sequences_run_on(refused, verdicts, released):
    one = OneRank(1, [2], refused=refused, verdicts=verdicts)
    one.begin()
    assert one.agreed == [True, not refused]
    assert (one.rows(), one.partition.ranks, one.table.num_sequences) == (["r2"], frozenset(), 1)
    assert released == [name for name in ("r0", "r1") if name not in refused]
    assert one.table.ledger.free_pages == 18


def test_nothing_is_copied_while_an_owner_lacks_pages(released):
    one = OneRank(0, [0, 1], verdicts=[False])
    one.begin()
    assert (one.copies.runs, one.rows(), one.partition.ranks, released) == ([], ["r0", "r1"], frozenset(), [])


def test_a_rank_without_a_part_agrees_and_changes_nothing():
    one = OneRank(2, [5])
    one.begin()
    assert (one.agreed, one.rows(), one.partition.ranks) == ([True, True], ["r5"], frozenset())
    assert one.copies.runs[0][1] == [
        Move(sequence_id="r0", source=0, target=1),
        Move(sequence_id="r1", source=0, target=1),
        Move(sequence_id="r2", source=1, target=0),
    ]


def test_a_set_that_runs_something_else_is_a_fault():
    one = OneRank(1, [2, 7])
    with pytest.raises(AssertionError, match="a set runs nothing else"):
        one.begin()


def test_a_partition_whose_sequences_have_all_ended_is_over():
    one = OneRank(1, [2])
    one.begin()
    one.table.record([one.table.finish(ended(request)) for request in one.running.reqs])
    assert (one.partition.ranks, one.partition.num_replicas) == (frozenset(), 0)


def test_only_owners_answer():
    answered = []
    streamer = SimpleNamespace(stream_output=lambda reqs, *args, **kwargs: answered.append(([*reqs], args)), other=5)
    scheduler = SimpleNamespace(batch_result_processor=Processor(output_streamer=streamer))
    silence(scheduler, {"r1"}.__contains__)
    speaking = scheduler.batch_result_processor.output_streamer
    requests = [request(number) for number in range(3)]
    speaking.stream_output(requests, False)
    speaking.stream_output([requests[1]], False)
    speaking.stream_output([], True)
    assert answered == [([requests[0], requests[2]], (False,)), ([], (True,))]
    assert speaking.other == 5
