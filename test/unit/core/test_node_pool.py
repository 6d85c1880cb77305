"""What the ranks of a node have in common is dealt by the states that they send."""

from __future__ import annotations

from dataclasses import replace

from rank_builders import PLAN, in_set, rank, running
from sequence_builders import sequence

from sgl_batch.core.node_pool import with_leases
from sgl_batch.core.page_ledger import PageLedger
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


def test_a_rank_that_shares_a_store_takes_no_replicas():
    state, account = rank().state, PageLedger(10, PLAN.page_size)
    assert RankState.of(state, account, None, ((), ())).takes_replicas
    use = StoreUse(total=100, leased=10, kept=0)
    assert not RankState.of(state, account, None, ((), ()), store=use).takes_replicas


def test_ranks_without_a_common_store_have_no_leases():
    ranks = [rank(), sharing(rank(), leased=50, kept=0)]
    assert with_leases(ranks, PLAN) == (ranks, ())
