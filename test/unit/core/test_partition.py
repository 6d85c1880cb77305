"""A set of ranks is partitioned if it can run the same rows, and no longer than nothing waits."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from rank_builders import PLAN, in_set, movable, rank, running
from sequence_builders import sequence

from sgl_batch.core.actions import EndPartition, Migrate, Partition, Prefill, Refill, Step
from sgl_batch.core.decision_record import group_record
from sgl_batch.core.partition import refusal, whole_set
from sgl_batch.core.rank_agreement import GroupDecision, decide_group
from sgl_batch.core.rank_moves import Migration
from sgl_batch.core.rank_state import RankState
from sgl_batch.core.replay import replay
from sgl_batch.core.sequence import Status

PAIR = frozenset((0, 1))


def decided(ranks: list[RankState], migration: Migration = Migration.PARTITION) -> GroupDecision:
    """Return a decision, which its record repeats."""
    decision = decide_group(ranks, PLAN, migration)
    record = json.loads(json.dumps(group_record(ranks, PLAN, migration, decision)))
    assert list(replay([record])) == []
    return decision


def owned(number: int, state: RankState) -> RankState:
    """Return a rank whose running sequences say that they belong to it."""
    runs = [replace(item, sequence=replace(item.sequence, ranks=frozenset((number,)))) for item in state.running]
    return replace(state, running=runs)


def two(**second) -> list[RankState]:
    return [owned(0, rank(runs=running(2))), owned(1, rank(**{"runs": running(1, first=7), **second}))]


def partitioned() -> list[RankState]:
    """Return two ranks that run three sequences together."""
    first, second = two()
    return [in_set(first, {0, 1}, 1), in_set(second, {0, 1}, 2)]


def why(ranks: list[RankState], of: frozenset[int] = PAIR) -> str | None:
    return refusal(whole_set(ranks, of), ranks, PLAN)


def test_a_set_has_the_sequences_of_its_ranks_by_rank_and_arrival():
    ranks = [rank(runs=list(reversed(running(2)))), rank(runs=running(1, first=7)), rank(runs=running(1, first=9))]
    assert [one.sequence_id for one in whole_set(ranks, {1, 0}).sequences] == ["s0", "s1", "s7"]


def test_ranks_that_run_only_what_can_be_replicated_can_be_partitioned():
    assert why(two()) is None


@pytest.mark.parametrize(
    ("second", "reason"),
    [
        ({"queued": [sequence(9)]}, "sequences wait"),
        ({"ready": [movable(9)]}, "sequences wait"),
        ({"unmovable_running": 1}, "rank 1 runs sequences that cannot be replicated"),
        ({"free_request_slots": 1}, "rank 1 has 1 request slots for 2 replicas"),
        ({"free_pages": 3}, "rank 1 has 3 pages for replicas, which can need 4"),
        ({"runs": running(7, first=7)}, "each rank would run 9 sequences, and b_moe is 8"),
        ({"runs": [replace(movable(7, status=Status.RUNNING), replicable=False)]}, "cannot be replicated"),
    ],
)
def test_a_partition_that_cannot_be_is_refused_with_the_numbers(second, reason):
    assert reason in why(two(**second))


def test_a_rank_without_replicas_or_in_another_set_or_whose_sequences_wait_for_pages_takes_no_part():
    first, second = two()
    assert "rank 1 takes no replicas" in why([first, replace(second, takes_replicas=False)])
    assert "rank 1 belongs to the partition of ranks [1, 2]" in why([first, in_set(second, {1, 2}, 0)])
    assert "sequences wait for pages of rank 1" in why([first, replace(second, has_waiting=True)])


def test_a_set_runs_all_sequences_of_its_ranks_and_has_at_least_two_that_exist():
    ranks = two()
    part = replace(whole_set(ranks, PAIR), sequences=(ranks[0].running[0].sequence,))
    assert (
        refusal(part, ranks, PLAN)
        == "the ranks [0, 1] run 3 sequences, and a set runs those of its partition and no others"
    )
    assert "at least two of ranks 0 to 1, not [0]" in why(ranks, frozenset((0,)))
    assert "not [1, 2]" in refusal(Partition(sequences=(), ranks=frozenset((1, 2))), ranks, PLAN)


def test_the_pages_that_own_sequences_can_still_need_count_too():
    first, second = two()
    growing = replace(second, free_pages=9, running=[replace(second.running[0], gap=6)])
    assert why([first, growing]) == "rank 1 has 3 pages for replicas, which can need 4"


def test_beside_a_store_the_pages_of_the_device_count_and_not_those_of_the_account():
    first, second = two()
    assert why([first, replace(second, free_pages=0, replica_room=4)]) is None
    assert why([first, replace(second, replica_room=3)]) == "rank 1 has 3 pages for replicas, which can need 4"


def test_every_other_boundary_begins_a_partition_and_ends_it():
    first = decided(two())
    assert [type(action) for action in first.actions[0]] == [Partition, Step]
    assert first.actions[1][0] is first.actions[0][0]
    second = decided(partitioned())
    assert second.actions[0] == second.actions[1] == (EndPartition(ranks=PAIR), Step())


def test_four_ranks_are_one_set_or_with_an_odd_number_of_sequences_two():
    four = [owned(number, rank(runs=running(1, first=number))) for number in range(4)]
    assert [sorted(one.ranks) for one in decided(four).partitions] == [[0, 1, 2, 3]]
    odd = [*four[:3], owned(3, rank(runs=running(2, first=8)))]
    assert [sorted(one.ranks) for one in decided(odd).partitions] == [[0, 1], [2, 3]]


@pytest.mark.parametrize("migration", [Migration.EVEN, Migration.NEVER, Migration.ALWAYS])
def test_a_partition_goes_on_while_nothing_waits_and_nothing_moves_to_or_from_its_ranks(migration):
    others = owned(2, rank(runs=running(6, first=20)))
    assert decided([*partitioned(), others], migration).actions == ((Step(),),) * 3


@pytest.mark.parametrize("migration", Migration)
def test_an_arrival_on_any_rank_ends_all_partitions_before_it_is_prefilled(migration):
    decision = decided([*partitioned(), rank(queued=[sequence(30)])], migration)
    assert [end.ranks for end in decision.ends] == [PAIR]
    assert all(isinstance(actions[0], EndPartition) for actions in decision.actions)
    assert isinstance(decision.actions[2][-1], Prefill)


def test_after_the_end_each_rank_decides_with_the_sequences_that_it_owns():
    ranks = [*partitioned(), rank(ready=[movable(30)])]
    decision = decided(ranks, Migration.EVEN)
    assert isinstance(decision.actions[2][-1], Refill)
    many = [in_set(rank(runs=running(5)), {0, 1}, 3), in_set(rank(runs=running(3, first=5)), {0, 1}, 5)]
    moves = decided([*many, rank(ready=[movable(30)])], Migration.EVEN).actions[0][1:-1]
    assert moves, "the ranks are uneven without replicas, with 5, 3 and 1"
    assert all(isinstance(one, Migrate) and one.source == 0 and one.target == 2 for one in moves)
