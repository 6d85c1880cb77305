"""Decides what the ranks of a node do with what they have in common: the blocks of their store."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from heapq import merge

from sgl_batch.core.admission import Admission, group_by_prompt, largest_gap, member_pages
from sgl_batch.core.page_boundary import prefill_wanted
from sgl_batch.core.page_ledger import PageLedger
from sgl_batch.core.plan import Plan
from sgl_batch.core.rank_state import RankState
from sgl_batch.core.store_lease import Lease, StoreUse, deal_blocks

Claim = tuple[int, int, int]
"""A queued unit: its arrival, the number of its rank, and the blocks that it reserves."""


def with_leases(ranks: Sequence[RankState], plan: Plan) -> tuple[Sequence[RankState], tuple[Lease, ...]]:
    """Return the states with the leases that the ranks have from this boundary on, and these; none without a store."""
    uses = [_use(rank, rank.store) for rank in ranks if rank.store is not None]
    if len(uses) < len(ranks):
        return ranks, ()
    claims: Iterable[Claim] = merge(*(_claims(number, rank, plan) for number, rank in enumerate(ranks)))
    leases = deal_blocks(
        uses,
        waiting=[rank.lacking if use.is_account else 0 for rank, use in zip(ranks, uses, strict=True)],
        claims=((number, blocks) for _, number, blocks in claims),
        weights=[1 + rank.state.running + len(rank.state.ready) + rank.state.returning for rank in ranks],
    )
    return [rank.with_lease(lease) for rank, lease in zip(ranks, leases, strict=True)], leases


def _use(rank: RankState, use: StoreUse) -> StoreUse:
    """Return what a rank has of the store. One that is partitioned keeps its whole lease until the partition ends."""
    return replace(use, kept=use.leased) if rank.partition else use


def _claims(number: int, rank: RankState, plan: Plan) -> Iterator[Claim]:
    """Yield a claim for each queued unit that the rank could prefill now, in the order of its queue."""
    state, ledger = replace(rank.state, filling=True), rank.ledger(plan.page_size)
    if ledger.has_waiting or not prefill_wanted(state, plan):
        return
    gap, slots = ledger.largest_gap, state.free_request_slots
    tokens = 0 if state.rest is None else state.rest.tokens
    for unit in group_by_prompt(state.queued, most_members=state.request_slots):
        rows = unit.leader.prefill_rows
        slots -= len(unit.members)
        if slots < 0 or (tokens and tokens + rows > plan.prefill.b_moe):
            return
        tokens += rows
        blocks, unit_gap = _blocks(unit, ledger, plan)
        yield unit.leader.arrival, number, blocks + max(0, unit_gap - gap)
        gap = max(gap, unit_gap)


def _blocks(unit: Admission, ledger: PageLedger, plan: Plan) -> tuple[int, int]:
    """Return the blocks that a unit reserves, and its largest gap; of its leader alone if all have never room."""
    for part in (unit, Admission(leader=unit.leader)):
        pages, gap = member_pages(part, ledger, plan), largest_gap(part, ledger, plan)
        if sum(pages) <= ledger.most(max(pages), gap):
            break
    return sum(pages), gap
