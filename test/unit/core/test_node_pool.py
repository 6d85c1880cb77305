"""What the ranks of a node have in common is dealt by the states that they send."""

from __future__ import annotations

from dataclasses import replace

from rank_builders import PLAN, in_set, movable, rank, running
from sequence_builders import sequence

from sgl_batch.core.node_pool import pooled, with_leases
from sgl_batch.core.rank_agreement import decide_group
from sgl_batch.core.rank_moves import Migration
from sgl_batch.core.rank_state import RankState
from sgl_batch.core.store_lease import StoreUse


def sharing(state: RankState, *, leased: int, kept: int, total: int = 100) -> RankState:
    """Return a rank that shares a store of `total` blocks."""
    return replace(state, store=StoreUse(total=total, leased=leased, kept=kept))


def test_a_rank_in_a_partition_keeps_its_whole_lease():
    queued = [sequence(10 + i, prompt=50, new=500) for i in range(8)]
    runs = running(2)
    ranks = [
        in_set(sharing(rank(runs=runs[:1]), leased=30, kept=5), {0, 1}, 1),
        in_set(sharing(rank(runs=runs[1:]), leased=30, kept=5), {0, 1}, 1),
        sharing(rank(queued=queued), leased=40, kept=0),
    ]
    _, leases = with_leases(ranks, PLAN)
    assert all(lease.blocks >= 30 for lease in leases[:2])
    free = [replace(one, partition=frozenset()) for one in ranks]
    assert with_leases(free, PLAN)[1][2].blocks > 40, "without the partition its free blocks are dealt"


def test_ranks_without_a_common_store_have_no_leases():
    ranks = [rank(), sharing(rank(), leased=50, kept=0)]
    assert with_leases(ranks, PLAN) == (ranks, ())


def waiting_in_store(count: int, **fields) -> RankState:
    return sharing(rank(ready=[movable(arrival) for arrival in range(count)], **fields), leased=50, kept=10)


def test_what_waits_in_the_store_goes_to_the_rank_that_runs_the_fewest():
    ranks = [replace(one, device_room=100) for one in (waiting_in_store(4), waiting_in_store(0))]
    moves = pooled(ranks, PLAN).moves
    assert [(move.sequence_id, move.target) for move in moves] == [("s1", 1), ("s3", 1)]


def test_a_rank_in_a_partition_gets_nothing_of_what_waits_in_the_store():
    ranks = [replace(one, device_room=100) for one in (waiting_in_store(4), waiting_in_store(0), waiting_in_store(0))]
    ranks[1] = in_set(ranks[1], {1, 2}, 1)
    ranks[2] = in_set(ranks[2], {1, 2}, 1)
    assert pooled(ranks, PLAN).moves == ()


def test_a_sequence_of_several_ranks_is_not_taken_from_the_pool():
    ranks = [replace(one, device_room=100) for one in (waiting_in_store(4), waiting_in_store(0))]
    kept = [replace(item, sequence=replace(item.sequence, ranks=frozenset((0, 1)))) for item in ranks[0].ready]
    state = replace(ranks[0].state, ready=[item.sequence for item in kept])
    assert pooled([replace(ranks[0], ready=kept, state=state), ranks[1]], PLAN).moves == ()


def test_ranks_prefill_only_where_what_waits_in_the_store_leaves_one_below_its_watermark():
    """Rank 1 has a prompt to compute, and runs what rank 0 has no rows for."""
    prompt = [sequence(90, prompt=20, new=5)]
    few, many = waiting_in_store(2), waiting_in_store(16)
    for first, prefills in ((few, True), (many, False)):
        ranks = [replace(first, device_room=100), replace(waiting_in_store(0, queued=prompt), device_room=100)]
        decision = decide_group(ranks, PLAN, Migration.EVEN)
        assert decision.prefill is prefills
        assert bool(decision.moves) is not prefills
        assert sum(lease.blocks for lease in decision.leases) == 100
