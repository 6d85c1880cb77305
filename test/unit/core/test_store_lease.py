"""The leases of a store's blocks: none is leased twice, what is kept stays, and the oldest prompt gets its blocks."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from sgl_batch.core.page_ledger import PageLedger
from sgl_batch.core.store_lease import Lease, StoreUse, deal_blocks


def uses(*kept: int, total: int, is_account: bool = True) -> list[StoreUse]:
    return [StoreUse(total=total, leased=kept_here, kept=kept_here, is_account=is_account) for kept_here in kept]


@given(data=st.data(), kept=st.lists(st.integers(0, 50), min_size=1, max_size=5), spare=st.integers(0, 100))
def test_leases_add_up_to_the_store_and_hold_what_is_kept(data, kept, spare):
    ranks = len(kept)
    waiting = data.draw(st.lists(st.integers(0, 40), min_size=ranks, max_size=ranks))
    weights = data.draw(st.lists(st.integers(1, 40), min_size=ranks, max_size=ranks))
    claims = data.draw(st.lists(st.tuples(st.integers(0, ranks - 1), st.integers(1, 60)), max_size=10))
    total = sum(kept) + spare
    leases = deal_blocks(uses(*kept, total=total), waiting=waiting, claims=claims, weights=weights)
    assert sum(lease.blocks for lease in leases) == total
    assert all(lease.blocks >= own for lease, own in zip(leases, kept, strict=True))


def test_what_admitted_sequences_wait_for_comes_before_prompts():
    leases = deal_blocks(uses(10, 10, total=30), waiting=[0, 8], claims=[(0, 5)], weights=[1, 1])
    assert [lease.blocks for lease in leases] == [12, 18]


def test_the_first_prompt_that_does_not_fit_gets_all_that_is_left_and_others_admit_none():
    leases = deal_blocks(uses(10, 10, total=30), waiting=[0, 0], claims=[(1, 4), (0, 50), (1, 1)], weights=[1, 100])
    assert leases == (Lease(blocks=16), Lease(blocks=14, admits=False))


def test_where_prompts_have_room_on_the_device_too_all_ranks_admit():
    ranks = uses(10, 10, total=30, is_account=False)
    leases = deal_blocks(ranks, waiting=[0, 0], claims=[(0, 50)], weights=[1, 1])
    assert leases == (Lease(blocks=20), Lease(blocks=10))


def test_what_no_prompt_claims_is_dealt_by_weight():
    leases = deal_blocks(uses(0, 0, 0, total=10), waiting=[0] * 3, claims=[], weights=[1, 2, 1])
    assert [lease.blocks for lease in leases] == [2, 5, 3]


def test_a_large_prompt_gets_its_blocks_though_others_always_have_smaller_ones():
    """Rank 1 takes any block that it may have; of what it gives back a half every time, the large one gets enough."""
    kept, boundaries = [0, 100], 0
    while True:
        claims = [(0, 90), *((1, 1) for _ in range(200))]
        first, second = deal_blocks(uses(*kept, total=100), waiting=[0, 0], claims=claims, weights=[1, 1])
        if first.blocks >= 90:
            break
        assert not second.admits
        kept[1], boundaries = second.blocks // 2, boundaries + 1
    assert boundaries < 10


@given(seed=st.integers(0, 10_000))
def test_accounts_of_a_store_never_hold_more_than_it_has(seed):
    """Random owners come, end and move between accounts; at each boundary the free blocks are dealt anew."""
    rng = random.Random(seed)
    ranks, total = rng.choice((2, 3, 4)), rng.randint(4, 60)
    accounts = [PageLedger(total // ranks, 16, pool_pages=total) for _ in range(ranks)]
    for number in range(60):
        account = rng.choice(accounts)
        owners = list(account.reservations())
        match rng.choice(("come", "come", "end", "move", "deal")):
            case "come" if account.fits(pages := rng.randint(1, total)):
                account.reserve(str(number), pages)
            case "end" if owners:
                account.release(rng.choice(owners))
            case "move" if owners:
                name, target = rng.choice(owners), rng.choice(accounts)
                pages = account.release(name)
                account.lease(account.total_pages - pages)
                target.lease(target.total_pages + pages)
                target.reserve(name, pages)
            case "deal":
                in_use = [StoreUse(total=total, leased=one.total_pages, kept=one.least_lease) for one in accounts]
                weights = [rng.randint(1, 5) for _ in accounts]
                leases = deal_blocks(in_use, waiting=[0] * ranks, claims=[], weights=weights)
                for one, lease in zip(accounts, leases, strict=True):
                    one.lease(lease.blocks, admits=lease.admits)
                assert sum(one.free_pages + one.reserved_pages for one in accounts) == total
        assert sum(one.free_pages + one.reserved_pages for one in accounts) <= total
        assert all(one.free_pages >= 0 for one in accounts)


def test_an_account_of_two_tiers_keeps_the_store_blocks_without_which_sequences_could_be_stuck():
    account = PageLedger(10, 16, overflow_pages=20, pool_pages=40)
    assert account.least_lease == 0
    for name, pages in (("a", 6), ("b", 8)):
        account.reserve(name, pages)
    assert account.least_lease == 14 - 10 + 8
    account.lease(account.least_lease)
    assert account.free_pages == 0
    account.release("b")
    account.lease(0)
    assert (account.two_tiers, account.free_pages) == (True, 4)
