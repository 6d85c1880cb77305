"""Which sequences form the next prefill group: first come first served, within tokens, pages and request slots."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sequence_builders import choices, sequence

from sgl_batch.core.admission import (
    Admission,
    group_by_prompt,
    refusal,
    reserve,
    select_prefill_group,
    unit_pages,
)
from sgl_batch.core.page_ledger import PageLedger

# No deadline: a busy machine is no fault of the code.
QUICK = settings(max_examples=200, deadline=None)
MANY = 10**6


def units_of(*prompts: int, new: int = 1) -> list[Admission]:
    return [Admission(leader=sequence(i, prompt=prompt, new=new)) for i, prompt in enumerate(prompts)]


def arrivals(units: list[Admission]) -> list[list[int]]:
    return [[member.arrival for member in unit.members] for unit in units]


def select(units, *, pages=MANY, b_moe=MANY, free_request_slots=MANY, taken=0, page_size=8):
    ledger = PageLedger(pages, page_size)
    if taken:
        ledger.reserve("others", taken)
    return arrivals(select_prefill_group(units, ledger, b_moe=b_moe, free_request_slots=free_request_slots))


# Selection.


def test_units_are_taken_while_their_prompts_fit_the_group():
    assert select(units_of(40, 30, 30, 1), b_moe=100) == [[0], [1], [2]]


def test_a_prompt_longer_than_the_group_forms_a_group_of_its_own():
    assert select(units_of(101, 1), b_moe=100) == [[0]]


def test_a_long_prompt_behind_others_waits_for_its_own_group_and_is_not_overtaken():
    assert select(units_of(5, 101, 5), b_moe=100) == [[0]]


def test_a_head_that_does_not_fit_the_free_pages_blocks_those_behind_it():
    assert select(units_of(80, 8), pages=20, taken=15) == []


def test_a_later_unit_that_does_not_fit_ends_the_group():
    assert select(units_of(8, 80, 8), pages=20, taken=15) == [[0]]


def test_generated_tokens_take_pages_but_no_room_in_the_group():
    assert select(units_of(4, 4, 4, new=61), pages=16, b_moe=12) == [[0], [1]]


def test_no_more_members_are_taken_than_request_slots_are_free():
    assert select(units_of(1, 1, 1), free_request_slots=2) == [[0], [1]]
    assert select(units_of(1), free_request_slots=0) == []


def test_a_unit_with_followers_needs_a_request_slot_for_every_member():
    unit = Admission(leader=choices(3)[0], followers=tuple(choices(3)[1:]))
    assert select([unit], free_request_slots=2) == []
    assert select([unit], free_request_slots=3) == [[0, 1, 2]]


def test_followers_add_nothing_to_the_tokens_of_a_group():
    group = choices(4, prompt=90)
    units = [Admission(leader=group[0], followers=tuple(group[1:])), Admission(leader=sequence(9, prompt=10))]
    assert select(units, b_moe=100) == [[0, 1, 2, 3], [9]]


def test_shared_tokens_and_pages_take_no_room():
    units = units_of(80, 80, 80)
    for unit in units[1:]:
        unit.leader.shared_tokens = 64
    assert select(units, b_moe=112, pages=14) == [[0], [1], [2]]
    assert select(units, b_moe=111, pages=14) == [[0], [1]]
    assert select(units, b_moe=112, pages=13) == [[0], [1]]


def test_a_unit_too_large_for_an_empty_device_is_taken_without_its_followers():
    group = choices(8, prompt=17, new=8)
    unit = Admission(leader=group[0], followers=tuple(group[1:]))
    # The prompt's 2 shared pages once and 8 members with 1 of their own, against 9.
    assert select([unit], pages=9) == [[0]]
    assert select([unit], pages=10) == [list(range(8))]


def test_no_unit_overtakes_the_followers_of_a_unit_that_was_cut():
    group = choices(8, prompt=17, new=8)
    units = [Admission(leader=group[0], followers=tuple(group[1:])), Admission(leader=sequence(9))]
    assert select(units, pages=9) == [[0]]


@QUICK
@given(
    prompts=st.lists(st.integers(1, 150), max_size=20),
    new=st.integers(0, 50),
    b_moe=st.integers(1, 200),
    pages=st.integers(20, 60),
    taken=st.integers(0, 20),
    free_request_slots=st.integers(0, 20),
)
def test_the_group_is_a_prefix_of_the_queue_within_all_limits(prompts, new, b_moe, pages, taken, free_request_slots):
    units, ledger = units_of(*prompts, new=new), PageLedger(pages, 8)
    ledger.reserve("others", taken)
    group = select_prefill_group(units, ledger, b_moe=b_moe, free_request_slots=free_request_slots)
    assert arrivals(group) == arrivals(units[: len(group)])
    tokens = sum(unit.leader.prompt_tokens for unit in group)
    assert tokens <= b_moe or len(group) == 1
    assert len(group) <= free_request_slots
    for unit in group:
        reserve(unit, ledger, held=0, new=0)  # it asserts that the pages are free
    if len(group) < len(units):
        following = units[len(group)]
        assert (
            (group and tokens + following.leader.prompt_tokens > b_moe)
            or unit_pages(following, ledger) > ledger.free_pages
            or len(group) == free_request_slots
        ), "the group ends only before a unit that does not fit"


# Units of the queue.


def test_choices_of_a_request_form_one_unit_at_the_position_of_its_leader():
    queue = [sequence(0), *choices(3, first=1), sequence(4)]
    assert arrivals(group_by_prompt(queue, most_members=9)) == [[0], [1, 2, 3], [4]]


def test_units_come_in_the_order_of_the_queue_with_a_leader_before_its_choices():
    queue = [sequence(4), *reversed(choices(3, first=1)), sequence(0)]
    assert arrivals(group_by_prompt(queue, most_members=9)) == [[4], [1, 3, 2], [0]]


def test_a_follower_without_its_leader_in_the_queue_computes_its_prompt_itself():
    _, *followers = choices(3)
    assert arrivals(group_by_prompt(followers, most_members=9)) == [[1], [2]]


def test_followers_past_the_most_members_are_left_for_the_next_group():
    group = choices(5)
    (unit,) = group_by_prompt(group, most_members=3)
    assert arrivals([unit]) == [[0, 1, 2]]
    left = [member for member in group if member not in unit.members]
    assert arrivals(group_by_prompt(left, most_members=3)) == [[3], [4]]


def test_requests_with_equal_prompts_are_kept_apart_by_their_groups():
    queue = choices(2, group="g") + choices(2, first=2, group="h")
    assert arrivals(group_by_prompt(queue, most_members=9)) == [[0, 1], [2, 3]]


# Pages of a unit.


@QUICK
@given(st.integers(2, 8), st.integers(1, 100), st.integers(0, 100))
def test_a_unit_with_followers_counts_the_shared_prompt_once(count, prompt, new):
    ledger = PageLedger(MANY, 8)
    group = choices(count, prompt=prompt, new=new)
    unit = Admission(leader=group[0], followers=tuple(group[1:]))
    whole, shared = ledger.whole_pages(group[0]), (prompt - 1) // 8
    assert unit_pages(unit, ledger) == count * whole - (count - 1) * shared


@pytest.mark.parametrize(("count", "found"), [(1, 0), (1, 2), (2, 0), (5, 1)])
def test_a_unit_reserves_what_it_needs(count, found):
    ledger = PageLedger(100, 8)
    group = choices(count, prompt=20, new=30)
    unit = Admission(leader=group[0], followers=tuple(group[1:]))
    unit.leader.shared_tokens = 8 * found
    reserve(unit, ledger, held=2, new=2 - found)
    assert ledger.reserved_pages == unit_pages(unit, ledger)
    assert all(ledger.held(member.sequence_id) == 7 - 2 for member in unit.members)
    assert ledger.prompt_pages == 2 - found, "pages that others hold are reserved already"


# Refusal.


def test_a_sequence_that_fits_an_empty_device_is_not_refused():
    ledger = PageLedger(4, 8)
    ledger.reserve("others", 4)
    assert refusal(sequence(prompt=20, new=13), ledger) is None


def test_a_sequence_that_can_never_fit_is_refused_with_the_numbers():
    message = refusal(sequence(prompt=20, new=14), PageLedger(4, 8))
    assert message is not None
    for number in ("20 tokens", "up to 14", "5 pages of 8 tokens", "holds 4", "at least 40"):
        assert number in message


def test_a_sequence_that_fits_the_device_and_not_the_store_is_refused_with_the_stores_numbers():
    device, store = PageLedger(5, 8), PageLedger(4, 8)
    assert refusal(sequence(prompt=20, new=13), device, store) is None
    message = refusal(sequence(prompt=20, new=14), device, store)
    assert message is not None
    for words in ("5 pages of 8 tokens", "the host KV store holds 4", "raise --kv-store-bytes"):
        assert words in message


def test_a_prompt_without_working_memory_is_refused_with_the_longest_that_has_it():
    assert refusal(sequence(prompt=20, new=1), PageLedger(9, 8), most_prompt_tokens=20) is None
    message = refusal(sequence(prompt=21, new=1), PageLedger(9, 8), most_prompt_tokens=20)
    assert message is not None
    assert "21 tokens" in message
    assert "groups of 20; shorten the prompt, or raise --b-moe-prefill" in message


@QUICK
@given(st.integers(1, 500), st.integers(1, 500), st.integers(1, 50), st.sampled_from([1, 8, 64]))
def test_the_remedy_of_a_refusal_is_enough_and_no_more_than_needed(prompt, new, pages, page_size):
    wanted = sequence(prompt=prompt, new=new)
    message = refusal(wanted, PageLedger(pages, page_size))
    if message is None:
        assert wanted.total_tokens <= pages * page_size
        return
    tokens = int(message.rpartition("at least ")[2])
    assert refusal(wanted, PageLedger(tokens // page_size, page_size)) is None
    assert refusal(wanted, PageLedger(tokens // page_size - 1, page_size)) is not None
