"""Decides what the ranks of a node do with what they share: blocks of their store, and sequences that wait there.

`store_lease` has the rule for blocks, `waiting_pool` that for sequences. Here both are applied to the states that ranks
send at a boundary. Ranks without a common store have nothing in common.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from heapq import merge

from sgl_batch.core.admission import Admission, group_by_prompt, largest_gap, member_pages
from sgl_batch.core.kv_state import KVState
from sgl_batch.core.page_boundary import prefill_wanted
from sgl_batch.core.page_ledger import PageLedger
from sgl_batch.core.plan import Plan
from sgl_batch.core.rank_moves import Move
from sgl_batch.core.rank_state import RankState
from sgl_batch.core.residency import pages_to_run, room_to_restore
from sgl_batch.core.store_lease import Lease, StoreUse, deal_blocks
from sgl_batch.core.waiting_pool import Room, Waiter, deal_waiting

# Streamed decode needs no pages of the device for a sequence to run.
_ANY_PAGES = 1 << 40

Claim = tuple[int, int, int]
"""A queued unit: its arrival, the number of its rank, and the blocks that it reserves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pooled:
    """The ranks of a node after the moves of sequences that wait in their store.

    ranks: their states after the moves. Nothing that waits may move again.
    moves: in the order of turns.
    all_run: whether none waits for a place on any rank.
    """

    ranks: Sequence[RankState]
    moves: tuple[Move, ...] = ()
    all_run: bool = True


def pooled(ranks: Sequence[RankState], plan: Plan) -> Pooled:
    """Deal the sequences that wait in the store of all ranks. Without such a store nothing moves."""
    if not all(rank.store for rank in ranks):
        return Pooled(ranks=ranks)
    waiting = [_waiters(number, rank, plan) for number, rank in enumerate(ranks)]
    dealt = deal_waiting([_room(rank, plan) for rank in ranks], waiting)
    return Pooled(ranks=_after(ranks, dealt.moves), moves=dealt.moves, all_run=dealt.all_run)


def device_room(kv: KVState, plan: Plan) -> int:
    """Return the pages of the device that a rank has for waiting sequences at this boundary."""
    return _ANY_PAGES if kv.streams else room_to_restore(kv.runners(), kv.device, plan)


def _room(rank: RankState, plan: Plan) -> Room:
    """Return what a rank has for waiting sequences: nothing while it is partitioned."""
    active = rank.state.running + rank.state.returning
    return Room(
        active=active,
        rows=0 if rank.partition else min(plan.decode.b_moe - active, rank.state.free_request_slots),
        pages=rank.device_room,
        account_pages=rank.free_pages + rank.largest_gap,
        largest_gap=rank.largest_gap,
        takes=not rank.has_waiting,
    )


def _waiters(number: int, rank: RankState, plan: Plan) -> Iterator[Waiter]:
    ledger, items = rank.ledger(plan.page_size), {item.sequence.sequence_id: item for item in rank.ready}
    for sequence in rank.state.ready:
        pages = pages_to_run(sequence, ledger, plan)
        yield Waiter(sequence=sequence, rank=number, pages=pages, item=items.get(sequence.sequence_id))


def _after(ranks: Sequence[RankState], moves: Sequence[Move]) -> list[RankState]:
    """Return the states after these moves, for more moves. What they bring, and what comes free, is not counted."""
    items = [{item.sequence.sequence_id: item for item in rank.ready} for rank in ranks]
    after = []
    for number, rank in enumerate(ranks):
        came = [items[move.source][move.sequence_id] for move in moves if move.target == number]
        gone = {move.sequence_id for move in moves if move.source == number}
        ready = [sequence for sequence in rank.state.ready if sequence.sequence_id not in gone]
        gap = max([rank.largest_gap, *(item.gap for item in came)])
        pages = sum(max(0, item.new_pages) for item in came)
        after.append(
            replace(
                rank,
                state=replace(rank.state, ready=[*ready, *(item.sequence for item in came)]),
                free_pages=rank.free_pages - pages - (gap - rank.largest_gap),
                largest_gap=gap,
                ready=(),
            )
        )
    return after


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
