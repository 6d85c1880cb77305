"""Decides when sequences may be partitioned over a set of ranks, and when that ends (BatchGen 4.2 and 5.3).

Theory of operation. While a sequence is partitioned, every rank of the set holds a replica of it: its request, its row
in the decode batch, and its whole KV. The ranks run the same steps, and so sample the same tokens; only the products of
a step are divided among them. One rank owns the sequence, from before to after. It alone answers, and it alone counts
the sequence; so the end of a partition drops replicas and moves nothing.

The rows of a set must be the same on all its ranks at each step. Therefore a set runs its partitioned sequences and
nothing else, each rank of it reserves all pages that they can need, and as soon as anything waits on any rank of the
group, all partitions end at the next boundary.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from sgl_batch.core.actions import EndPartition, Partition
from sgl_batch.core.plan import Plan
from sgl_batch.core.rank_state import RankState


def partitioned_sets(ranks: Iterable[RankState]) -> list[frozenset[int]]:
    """Return the sets of ranks that are partitioned now, those with the lowest ranks first."""
    return sorted({rank.partition for rank in ranks if rank.partition}, key=min)


def anything_waits(ranks: Iterable[RankState]) -> bool:
    """Return whether on any rank a sequence waits for anything: to be prefilled, to run, or for its KV."""
    states = (rank.state for rank in ranks)
    return any(state.queued or state.ready or state.returning or state.forked or state.begun for state in states)


def without_replicas(ranks: Sequence[RankState], ends: Iterable[EndPartition]) -> list[RankState]:
    """Return the states of the ranks when these partitions have ended. The pages of replicas do not count as free yet.

    At the next boundary they do.
    """
    ended = {rank for end in ends for rank in end.ranks}
    return [
        replace(
            rank,
            state=replace(rank.state, running=rank.state.running - rank.replicas),
            running=[
                replace(item, sequence=replace(item.sequence, ranks=frozenset((number,)))) for item in rank.running
            ],
            partition=frozenset(),
            replicas=0,
        )
        if number in ended
        else rank
        for number, rank in enumerate(ranks)
    ]


def whole_set(ranks: Sequence[RankState], of: Iterable[int]) -> Partition:
    """Return the partition of all movable running sequences of these ranks: by rank, then in the order of arrival."""
    numbers = sorted(of)
    return Partition(
        sequences=tuple(
            item.sequence
            for number in numbers
            for item in sorted(ranks[number].running, key=lambda item: item.sequence.arrival)
        ),
        ranks=frozenset(numbers),
    )


def refusal(partition: Partition, ranks: Sequence[RankState], plan: Plan) -> str | None:
    """Return why these ranks cannot be partitioned now, with the numbers; None if they can.

    Args:
        partition: the sequences and the set.
        ranks: the state of each rank, by rank.
        plan: the plan in force.
    """
    numbers = sorted(partition.ranks)
    if len(numbers) < 2 or not 0 <= numbers[0] <= numbers[-1] < len(ranks):
        return f"a partition is over at least two of ranks 0 to {len(ranks) - 1}, not {numbers}"
    if anything_waits(ranks):
        return "sequences wait on a rank, and a partition is for when none does"
    names = [sequence.sequence_id for sequence in partition.sequences]
    runners = [item.sequence.sequence_id for number in numbers for item in ranks[number].running]
    if not names or sorted(names) != sorted(runners):
        return f"the ranks {numbers} run {len(runners)} sequences, and a set runs those of its partition and no others"
    if len(names) > plan.decode.b_moe:
        return f"each rank would run {len(names)} sequences, and b_moe is {plan.decode.b_moe}"
    return next(filter(None, (_refusal_of(number, ranks, numbers) for number in numbers)), None)


def _refusal_of(number: int, ranks: Sequence[RankState], numbers: Sequence[int]) -> str | None:
    """Return why a rank of the set cannot hold replicas of the others' sequences."""
    rank = ranks[number]
    if not rank.takes_replicas:
        return f"rank {number} takes no replicas: it streams KV from a host store, or limits the time of a request"
    if rank.partition:
        return f"rank {number} belongs to the partition of ranks {sorted(rank.partition)}"
    if rank.state.running > sum(item.replicable for item in rank.running):
        return f"rank {number} runs sequences that cannot be replicated"
    if rank.has_waiting:
        return f"sequences wait for pages of rank {number}"
    if not all(copy.arrived for copy in rank.held):
        return f"copies of sequences that were to move are under way to rank {number}"
    arriving = [item for other in numbers if other != number for item in ranks[other].running]
    if len(arriving) > rank.state.free_request_slots:
        return f"rank {number} has {rank.state.free_request_slots} request slots for {len(arriving)} replicas"
    pages = sum(item.pages + item.gap for item in arriving)
    if pages > rank.room_for_replicas:
        return f"rank {number} has {rank.room_for_replicas} pages for replicas, which can need {pages}"
    return None


def ends_of(ranks: Sequence[RankState]) -> tuple[EndPartition, ...]:
    """Return the end of every partition."""
    return tuple(EndPartition(ranks=of) for of in partitioned_sets(ranks))


def at_every_other_boundary(ranks: Sequence[RankState], plan: Plan) -> tuple[Partition, ...]:
    """Return partitions of all ranks where none is partitioned, for tests.

    With an even number of running sequences all ranks are one set, with an odd number each two neighbours are. Sets
    that cannot be partitioned are left out.
    """
    running = sum(rank.state.running for rank in ranks)
    size = 2 if running % 2 else len(ranks)
    sets = [whole_set(ranks, range(first, first + size)) for first in range(0, len(ranks) - size + 1, size)]
    return tuple(one for one in sets if refusal(one, ranks, plan) is None)
