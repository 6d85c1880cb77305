"""The steps of several ranks as the scheduler takes them, over channels, with virtual sequences instead of requests."""

from __future__ import annotations

import dataclasses
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import virtual_partition
from rank_scenarios import Scenario, outgrowing, tight
from rank_wires import MemoryChannel, all_at_once, in_memory
from sequence_builders import plan
from virtual_rank import VirtualRank
from virtual_ranks import Part, VirtualRanks
from virtual_sequences import Batch, Request, Running

from sgl_batch.core.actions import Partition
from sgl_batch.core.admission_policy import Forecast, TwoPage
from sgl_batch.core.move_costs import UNKNOWN
from sgl_batch.core.rank_moves import Migration, Move
from sgl_batch.core.topology import Topology
from sgl_batch.managers import rank_messages
from sgl_batch.managers.rank_group import RankGroup
from sgl_batch.managers.rank_messages import PartitionRow
from sgl_batch.managers.rank_steps import RankSteps

SOON_S = 10.0


class MovesTogether:
    """Stands in for `RankMigration` on all ranks: the moves are made when every rank has called `run`."""

    def __init__(self, ranks: ThreadedRanks, num_ranks: int) -> None:
        self._ranks = ranks
        self._moves: list[list[Move]] = []
        self._barrier = threading.Barrier(num_ranks, action=self._carry_out, timeout=SOON_S)

    sends_pages = False
    held: tuple[()] = ()
    rates = UNKNOWN

    def note_prefill(self, tokens: int, seconds: float) -> None:
        """Virtual steps take no time."""

    def advance(self) -> None:
        """No copy is under way."""

    def copy(self, copies: list[object]) -> None:
        assert not copies

    def drop_copies(self) -> None:
        """There is none."""

    def run(self, moves: list[Move], running: object) -> None:
        self._moves.append(moves)
        self._barrier.wait()

    def _carry_out(self) -> None:
        assert all(moves == self._moves[0] for moves in self._moves), "all ranks make the same moves"
        self._ranks.carry_out(self._moves[0])
        self._moves.clear()


class PartitionsTogether:
    """Stands in for `RankPartition` on all ranks: replicas are made when every rank has called `begin`."""

    def __init__(self, ranks: ThreadedRanks, num_ranks: int) -> None:
        self._ranks = ranks
        self._asked: list[list[PartitionRow]] = []
        self._barrier = threading.Barrier(num_ranks, action=self._carry_out, timeout=SOON_S)

    def begin(self, partitions: list[PartitionRow]) -> None:
        self._asked.append(partitions)
        self._barrier.wait()

    def _carry_out(self) -> None:
        assert all(asked == self._asked[0] for asked in self._asked), "all ranks begin the same partitions"
        self._ranks.partition([self._partition(row) for row in self._asked[0]])
        self._asked.clear()

    def _partition(self, row: PartitionRow) -> Partition:
        owned = zip(row.sequence_ids, row.owners, strict=True)
        sequences = tuple(self._ranks.ranks[owner].sequence_named(name) for name, owner in owned)
        return Partition(sequences=sequences, ranks=frozenset(row.ranks))


class PromptsTogether:
    """Stands in for `RankPrompts` on all ranks: replicas of a prompt are made when every rank has called `begin`."""

    def __init__(self, ranks: ThreadedRanks, num_ranks: int) -> None:
        self._ranks = ranks
        self._asked: list[PartitionRow] = []
        self.batches: dict[int, Batch] = {}
        self._barrier = threading.Barrier(num_ranks, action=self._carry_out, timeout=SOON_S)

    def begin(self, partition: PartitionRow) -> bool:
        self._asked.append(partition)
        self._barrier.wait()
        return bool(self.batches)

    def _carry_out(self) -> None:
        row = self._asked[0]
        assert all(asked == row for asked in self._asked), "all ranks share the same prompt"
        (name,), (owner,) = row.sequence_ids, row.owners
        whole = Partition(sequences=(self._ranks.ranks[owner].queued[name],), ranks=frozenset(row.ranks))
        self.batches = self._ranks.share_prompt((whole,))
        self._asked.clear()


class OneRanksPrompts:
    """The part of one rank in these prompts."""

    def __init__(self, together: PromptsTogether, number: int) -> None:
        self._together, self._number = together, number

    def begin(self, partition: PartitionRow) -> bool:
        return self._together.begin(partition)

    def batch(self) -> Batch:
        return self._together.batches[self._number]


class OneRanksPartition:
    """The part of one rank in these partitions."""

    def __init__(self, together: PartitionsTogether, rank: VirtualRank, number: int, prompts: OneRanksPrompts) -> None:
        self._together, self._rank, self._number = together, rank, number
        self.prompts = prompts

    @property
    def ranks(self) -> frozenset[int]:
        return virtual_partition.set_of(self._rank.running)

    @property
    def num_replicas(self) -> int:
        return virtual_partition.num_replicas(self._rank.running)

    def begin(self, partitions: list[PartitionRow], running: Running) -> Running:
        self._together.begin(partitions)
        return running

    def end(self, running: Running) -> Running:
        return virtual_partition.end(self._rank, self._number, running)


class ThreadedRanks(VirtualRanks):
    """Virtual ranks that agree as real ones do, each in a thread of its own, over its channel."""

    def __init__(self, scenario: Scenario, migration: Migration, channels: list[MemoryChannel], **growth: Any) -> None:
        super().__init__(
            **scenario.arguments,
            migration=migration,
            **growth,
        )
        together = MovesTogether(self, scenario.num_ranks)
        partitions = PartitionsTogether(self, scenario.num_ranks)
        prompts = PromptsTogether(self, scenario.num_ranks)
        self._channels = channels
        self._steps = [
            RankSteps(
                rank,
                RankGroup(channel, Topology.uniform(scenario.num_ranks), migration=migration, timeout_s=SOON_S),
                together,
                partition=OneRanksPartition(partitions, rank, channel.rank, OneRanksPrompts(prompts, channel.rank)),
            )
            for rank, channel in zip(self.ranks, channels, strict=True)
        ]

    def parts(self) -> list[Part]:
        return all_at_once([partial(self._part, number) for number in range(len(self.ranks))])

    def _part(self, number: int) -> Part:
        rank = self.ranks[number]
        try:
            part = self._steps[number].next_part(rank.running)
        except BaseException:
            self._channels[number].close()  # so that the others do not wait for it
            raise
        rank.running = part.running
        return Part(batch=part.batch, enters=("experts", part.expert_calls) if part.takes_part else None)


@contextmanager
def threaded(scenario: Scenario, migration: Migration, **growth: Any) -> Iterator[ThreadedRanks]:
    with in_memory(scenario.num_ranks) as channels:
        yield ThreadedRanks(scenario, migration, channels, **growth)


def sharing(scenario: Scenario) -> Scenario:
    """Return a job in which all ranks share prompts of 10 tokens or more."""
    return dataclasses.replace(scenario, plan=dataclasses.replace(scenario.plan, partition_prompt_tokens=10))


GROWTH = {"overflow_pages": 20, "restore_steps": 3}


@pytest.mark.parametrize("migration", Migration)
@pytest.mark.parametrize(
    ("seed", "make", "growth"),
    [
        *((seed, tight, {}) for seed in range(5)),
        *((seed, tight, {"is_shared": True}) for seed in range(3)),
        (9, outgrowing, {"admission": Forecast, **GROWTH}),
        (12, outgrowing, {"admission": TwoPage, **GROWTH}),
    ],
)
def test_ranks_that_agree_over_channels_act_as_one_decision_for_all(seed, make, growth, migration):
    """The log is the same, step for step, as that of virtual ranks without messages."""
    scenario = sharing(make(seed))
    without_messages = VirtualRanks(
        **scenario.arguments,
        migration=migration,
        **growth,
    ).run()
    with threaded(scenario, migration, **growth) as ranks:
        log = ranks.run()
    for name in ("steps", "ended_at", "moved", "partitions", "undone", "prompts_shared"):
        assert getattr(log, name) == getattr(without_messages, name), name


@pytest.mark.parametrize("seed", range(5))
def test_prompt_groups_that_are_sent_in_parts_finish(seed, monkeypatch):
    monkeypatch.setattr(rank_messages, "MOST_QUEUED", 3)
    rng = random.Random(seed)
    requests = [
        Request(at=rng.randint(0, 5), rank=rng.randint(0, 1), prompt=20, max_new=9, output=9, choices=rng.randint(1, 7))
        for _ in range(12)
    ]
    scenario = Scenario(seed=seed, num_ranks=2, plan=plan(), pages=60, request_slots=16, requests=requests, failing=0.0)
    with threaded(scenario, Migration.EVEN) as ranks:
        log = ranks.run()
    assert len(log.ended_at) == sum(request.choices for request in requests)
    assert log.refused == []
