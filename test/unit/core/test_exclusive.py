"""Where prompts go with an exclusive store, and how many sequences it admits."""

from __future__ import annotations

import dataclasses

import pytest
from sequence_builders import plan, sequence

from sgl_batch.core.admission import Admission, refusal, select_prefill_group
from sgl_batch.core.exclusive import TierCapacity, assign_tier, stays_on_device
from sgl_batch.core.page_ledger import PageLedger

PLAN = plan(b_moe=4, boundary_tokens=8, page_size=8)


def unit(arrival: int, *, prompt: int = 16, new: int = 40, followers: int = 0) -> Admission:
    """Return a unit whose leader needs four pages to run, two of them for its prompt."""
    leader = sequence(arrival, prompt=prompt, new=new)
    others = tuple(sequence(arrival + 1 + i, prompt=prompt, new=new) for i in range(followers))
    return Admission(leader=leader, followers=others)


def chosen(units: list[Admission], capacity: TierCapacity, *, store_pages: int = 20) -> list[Admission]:
    return list(assign_tier(units, capacity, PageLedger(20, 8, overflow_pages=store_pages), PLAN))


def on_device(units: list[Admission], capacity: TierCapacity) -> bool:
    return stays_on_device(units, capacity, PageLedger(20, 8, overflow_pages=20), PLAN)


def test_prompts_stay_on_the_device_if_they_can_run_there():
    units, capacity = [unit(i) for i in range(4)], TierCapacity(device=13, store=100)
    assert chosen(units, capacity) == units[:3]
    assert on_device(units[:3], capacity)
    assert not on_device(units, capacity)


@pytest.mark.parametrize("device", [None, 3])
def test_prompts_go_to_the_store_if_a_sequence_waits_there_or_the_device_is_full(device):
    units, capacity = [unit(i) for i in range(4)], TierCapacity(device=device, store=7)
    assert chosen(units, capacity) == units[:3], "two pages of each prompt"
    assert not on_device(units[:3], capacity)


def test_no_prompt_passes_a_head_that_neither_tier_has_room_for():
    assert chosen([unit(0, prompt=80), unit(1)], TierCapacity(device=5, store=9)) == []


def test_choices_begin_in_the_store_and_each_counts_its_references():
    shared, alone = unit(0, followers=2), unit(9)
    assert chosen([shared, alone], TierCapacity(device=20, store=6)) == [shared]
    assert not on_device([shared], TierCapacity(device=20, store=6))
    assert chosen([shared], TierCapacity(device=20, store=5)) == []
    assert chosen([alone, shared], TierCapacity(device=20, store=20)) == [alone], (
        "prompts that stay on the device form a group of their own"
    )


def test_a_prompt_that_the_store_cannot_hold_for_all_choices_is_taken_without_followers():
    shared = unit(0, followers=2)
    assert chosen([shared, unit(9)], TierCapacity(device=20, store=5), store_pages=5) == [
        Admission(leader=shared.leader)
    ]


def test_prompts_that_cannot_go_to_the_store_wait_for_room_on_the_device():
    units = [unit(i) for i in range(4)]
    assert chosen(units, TierCapacity(device=13, store=100, to_store=False)) == units[:3]
    assert chosen(units, TierCapacity(device=3, store=100, to_store=False)) == []
    assert chosen(units, TierCapacity(device=None, store=100, to_store=False)) == []


def test_choices_compute_their_prompt_themselves_if_prompts_cannot_go_to_the_store():
    shared, capacity = unit(0, followers=2), TierCapacity(device=20, store=100, to_store=False)
    assert chosen([shared, unit(9)], capacity) == [Admission(leader=shared.leader)]
    assert on_device([Admission(leader=shared.leader)], capacity)


def test_admission_counts_the_store_less_room_for_the_largest_sequence():
    ledger = PageLedger(20, 8, overflow_pages=10)
    ledger.reserve("a", 6)
    assert ledger.fits(6, 6, 6)
    assert not ledger.fits(6, 6, 7), "20 + 10 - 6 = 24 are the most, and with one of 7 only 23"
    assert ledger.fits(14)
    assert not ledger.fits(15), "21 of 20: for so large a sequence the store does not count"
    assert ledger.free_pages == 18


def test_a_prefill_group_fits_device_and_store_together():
    ledger = PageLedger(20, 8, overflow_pages=10)
    units = [unit(i, prompt=16, new=33) for i in range(9)]  # six pages each
    assert len(select_prefill_group(units, ledger, b_moe=1000, free_request_slots=99)) == 4


def test_a_sequence_that_fits_the_device_is_not_refused_for_a_small_store():
    ledger = PageLedger(20, 8)
    assert refusal(sequence(0, prompt=100, new=61), ledger, PageLedger(20, 8, overflow_pages=1)) is None


def test_choices_share_no_pages_with_an_exclusive_store():
    ledger = PageLedger(60, 8, overflow_pages=10)
    shared = unit(0, prompt=16, new=33, followers=1)
    grouped = Admission(
        leader=dataclasses.replace(shared.leader, prompt_group="g"),
        followers=tuple(dataclasses.replace(f, prompt_group="g", choice=1) for f in shared.followers),
    )
    assert [ledger.own_pages(member) for member in grouped.members] == [6, 6]
