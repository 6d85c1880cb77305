"""Owns the invariants of a virtual rank between two steps."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sgl_batch.core.page_ledger import pages_for
from sgl_batch.core.sequence import SequenceState, Status

if TYPE_CHECKING:
    from virtual_rank import VirtualRank


def check(rank: VirtualRank) -> None:
    """Check the invariants between two steps: statuses fit, pages add up, request slots suffice."""
    for statuses, sequences in (
        ((Status.QUEUED,), [*rank.queued.values(), *rank.forked]),
        ((Status.READY, Status.SUSPENDED), [*rank.ready.values(), *rank.overflow.returning]),
        ((Status.RUNNING, Status.REPLICA), rank.running.reqs),
    ):
        assert all(sequence.status in statuses for sequence in sequences)
    begun = [] if rank.begun is None else [rank.begun]
    assert all(sequence.status is Status.PREFILLING for sequence in begun)
    assert not rank.forks
    assert not rank.expected
    waiting = [one for name, one in rank.ready.items() if name not in rank.ledger.away]
    held = [*rank.forked, *waiting, *rank.running.reqs, *begun]
    assert len(held) <= rank.request_slots
    assert len(rank.running.reqs) <= rank.plan.decode.b_moe
    if rank.replica_ledger is not rank.ledger:
        replicas = {one.sequence_id for one in held if one.status is Status.REPLICA}
        assert rank.replica_ledger.reservations().keys() == replicas
        held = [one for one in held if one.sequence_id not in replicas]
    _check_pages(rank, held)


def _check_pages(rank: VirtualRank, held: list[SequenceState]) -> None:
    """`held`: the sequences with pages of the device, but for those on their way back."""
    ledger, size = rank.ledger, rank.plan.page_size
    holds = {s.sequence_id: rank.tree.match_of(s.sequence_id).pages for s in held}
    prompts = {id(page) for pages in holds.values() for page in pages}
    assert ledger.prompt_pages == len(prompts)
    if not ledger.policy.grows:
        pages = len(prompts) + sum(ledger.whole_pages(s) - len(holds[s.sequence_id]) for s in held)
        assert ledger.reserved_pages == pages
    returning = {s.sequence_id: pages_for(s.kv_tokens, size) for s in rank.overflow.returning}
    used = {s.sequence_id: _used_pages(rank, s) - len(holds[s.sequence_id]) for s in held} | returning
    assert used.keys() == ledger.reservations().keys()
    for name, pages in used.items():
        most = ledger.whole_need(name) if name == ledger.borrower else ledger.held(name)
        assert pages <= most, f"{name} uses {pages} pages of {most}"
    assert len(prompts) + sum(max(0, pages) for pages in used.values()) <= ledger.total_pages
    assert ledger.free_pages == ledger.total_pages - ledger.reserved_pages - ledger.largest_gap >= 0
    assert ledger.stalled.keys() <= rank.ready.keys(), "what waits for pages of the account does not run"
    assert ledger.away <= rank.ready.keys() | returning.keys()


def _used_pages(rank: VirtualRank, one: SequenceState) -> int:
    """Return the pages that hold its KV, shared ones among them."""
    tokens = {Status.QUEUED: 0, Status.PREFILLING: one.computed_tokens}.get(one.status, one.kv_tokens)
    return pages_for(tokens, rank.plan.page_size)
