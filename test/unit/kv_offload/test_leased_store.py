"""A rank's lease of a store: what it keeps, and how it grows and shrinks with sequences that move."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from sgl_batch.core.page_ledger import PageLedger
from sgl_batch.core.store_lease import Lease, StoreUse
from sgl_batch.kv_offload.leased_store import LeasedStore


def stored(*, leased: int, held: int = 0, num_pending: int = 0, blocks: int = 0) -> SimpleNamespace:
    return SimpleNamespace(
        leased=leased, held=held, num_pending=num_pending, store_blocks_of=lambda name: list(range(blocks))
    )


def account(*, leased: int = 10, reserved: int = 0) -> PageLedger:
    made = PageLedger(leased, 8, pool_pages=20)
    if reserved:
        made.reserve("a", reserved)
    return made


def test_what_is_reserved_and_what_is_still_written_to_is_kept():
    lease = LeasedStore(stored(leased=10, num_pending=2), total=20, account=account(reserved=5))
    assert lease.use() == StoreUse(total=20, leased=10, kept=7)


def test_no_more_is_kept_than_leased():
    lease = LeasedStore(stored(leased=10, num_pending=7), total=20, account=account(reserved=5))
    assert lease.use().kept == 10


def test_without_an_account_of_blocks_those_that_are_held_are_kept():
    lease = LeasedStore(stored(leased=10, held=4), total=20, account=None)
    assert lease.use() == StoreUse(total=20, leased=10, kept=4, is_account=False)


def test_in_two_tiers_at_least_the_blocks_that_are_held_are_kept():
    two_tiers = PageLedger(4, 8, overflow_pages=10, pool_pages=20)
    lease = LeasedStore(stored(leased=10, held=3, blocks=2), total=20, account=two_tiers)
    assert lease.use() == StoreUse(total=20, leased=10, kept=3, is_account=False)
    two_tiers.reserve("a", 4)
    two_tiers.reserve("b", 4)
    assert lease.use().kept == 8
    assert lease.blocks_with("a") == 2


def test_a_lease_limits_the_blocks_that_are_taken_and_the_account():
    blocks, ledger = stored(leased=10), account(reserved=5)
    LeasedStore(blocks, total=20, account=ledger).set(Lease(blocks=6, admits=False))
    assert (blocks.leased, ledger.free_pages, ledger.admits) == (6, 1, False)


def test_a_lease_smaller_than_what_is_reserved_is_a_fault():
    with pytest.raises(AssertionError, match="is 1 less than what is reserved"):
        LeasedStore(stored(leased=10), total=20, account=account(reserved=5)).set(Lease(blocks=4))


def test_a_sequence_that_moves_takes_its_reservation_of_the_lease_along():
    blocks, ledger = stored(leased=10), account(reserved=5)
    lease = LeasedStore(blocks, total=20, account=ledger)
    assert lease.blocks_with("a") == 5
    ledger.release("a")
    lease.change(-5)
    assert (blocks.leased, ledger.total_pages) == (5, 5)
    lease.change(3)
    assert (blocks.leased, ledger.total_pages, ledger.admits) == (8, 8, True)
