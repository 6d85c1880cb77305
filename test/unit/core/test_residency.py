"""Which sequences keep device pages at a boundary: rules one by one, then long random runs under pressure."""

from __future__ import annotations

import random

import pytest
from sequence_builders import plan, sequence
from virtual_memory_pressure import VirtualPressure
from virtual_two_tiers import VirtualTwoTiers

from sgl_batch.core.page_ledger import PageLedger
from sgl_batch.core.residency import decide_residency, pages_to_run
from sgl_batch.core.resident_prompts import ResidentPrompts

PLAN = plan(b_moe=4, boundary_tokens=8, page_size=8)


def runner(arrival: int, *, prompt: int = 8, new: int = 100, generated: int = 1):
    made = sequence(arrival, prompt=prompt, new=new)
    made.generated_tokens, made.waits_since = generated, arrival
    return made


def holding(pages: int, *held: tuple) -> PageLedger:
    ledger = PageLedger(pages, PLAN.page_size)
    for owner, number in held:
        ledger.reserve(owner.sequence_id, number)
    return ledger


def decided(running, waiting, ledger, plan, *, restoring=0, prompts=None):
    """Decide for sequences, of which `prompts` gives the shareable prompt pages by arrival."""
    of = {f"s{arrival}": pages for arrival, pages in (prompts or {}).items()}
    resident = ResidentPrompts()
    for each in running:
        resident.enter(each.sequence_id, of.get(each.sequence_id, ()))
    ledger.add_prompt_pages(len(resident))
    return decide_residency(
        running, waiting, ledger, plan, prompts=resident, pages_of=lambda name: of.get(name, ()), restoring=restoring
    )


@pytest.mark.parametrize(
    ("prompt", "generated", "new", "boundary", "pages"),
    [
        (8, 1, 100, 8, 3),  # one full page and two free ones
        (9, 1, 100, 8, 4),
        (8, 1, 100, 64, 9),  # the next boundary is eight pages away
        (8, 1, 3, 8, 2),  # no more than it can use to its end
        (8, 2, 100, 8, 4),
    ],
)
def test_a_runner_holds_two_free_pages_or_what_it_can_reach_before_the_next_boundary(
    prompt, generated, new, boundary, pages
):
    one = runner(0, prompt=prompt, new=new, generated=generated)
    assert pages_to_run(one, PageLedger(100, 8), plan(boundary_tokens=boundary, page_size=8)) == pages


def test_if_all_fit_none_is_suspended_and_the_longest_waiting_are_restored():
    runs, late, early = runner(0), runner(9), runner(3)
    turn = decided([runs], [early, late], holding(20, (runs, 3)), PLAN)
    assert turn.suspend == ()
    assert turn.extend == ((runs, 3),)
    assert [s for s, _ in turn.restore] == [early, late]


def test_the_most_decoded_are_suspended_until_the_others_can_be_extended():
    young, old, middle = runner(0, generated=1), runner(1, generated=40), runner(2, generated=20)
    turn = decided([young, old, middle], [], holding(12, (young, 2), (old, 6), (middle, 4)), PLAN)
    assert turn.suspend == (old,)
    assert turn.extend == ((young, 3), (middle, 6))


def test_if_fewer_may_run_now_the_most_decoded_are_suspended():
    young, old, middle = runner(0, generated=1), runner(1, generated=40), runner(2, generated=20)
    ledger = holding(90, (young, 2), (old, 6), (middle, 4))
    turn = decided([young, old, middle], [runner(3)], ledger, plan(b_moe=1, boundary_tokens=8, page_size=8))
    assert turn.suspend == (old, middle)
    assert turn.restore == ()


def test_another_victim_policy_suspends_other_sequences():
    class LeastDecoded:
        def victims(self, running, need):
            assert need > 0
            return iter(sorted(running, key=lambda s: s.generated_tokens))

    young, old = runner(0, generated=1), runner(1, generated=40)
    ledger = holding(9, (young, 2), (old, 6))
    resident = ResidentPrompts()
    turn = decide_residency(
        [young, old], [], ledger, PLAN, prompts=resident, pages_of=lambda _: (), victims=LeastDecoded()
    )
    assert turn.suspend == (young,)


def test_one_that_does_not_fit_blocks_those_behind_it():
    large, small = runner(1, prompt=80), runner(2)
    turn = decided([], [large, small], holding(11), PLAN)
    assert turn.restore == ()


def test_the_decode_group_counts_sequences_on_their_way_toward_its_limit():
    waiting = [runner(i) for i in range(6)]
    turn = decided([], waiting, holding(100), PLAN, restoring=3)
    assert len(turn.restore) == 1


def test_the_last_runner_is_suspended_for_one_whose_kv_is_on_its_way():
    runs, comes = runner(0, prompt=30, generated=9), runner(1, prompt=30)
    turn = decided([runs], [], holding(9, (runs, 5), (comes, 4)), PLAN, restoring=1)
    assert turn.suspend == (runs,)


def test_a_suspended_sequence_is_not_restored_at_the_same_boundary():
    runs, grown = runner(0, generated=1), runner(1, generated=50)
    turn = decided([runs, grown], [], holding(10, (runs, 2), (grown, 8)), PLAN)
    assert turn.suspend == (grown,)
    assert turn.restore == ()


def test_shared_prompt_pages_take_room_once():
    runs, first, second = runner(0, prompt=80), runner(1, prompt=80), runner(2, prompt=80)
    alike = dict.fromkeys(range(3), "abcdefghij")
    assert [s for s, _ in decided([runs], [first, second], holding(15, (runs, 2)), PLAN, prompts=alike).restore] == [
        first
    ]
    turn = decided([runs], [first, second], holding(16, (runs, 2)), PLAN, prompts=alike)
    assert turn.restore == ((first, 2), (second, 2))


def test_a_suspended_sequence_leaves_the_prompt_pages_that_others_hold():
    young, old = runner(0, prompt=16), runner(1, prompt=16, generated=40)
    turn = decided([young, old], [], holding(11, (young, 2), (old, 6)), PLAN, prompts={0: "ab", 1: "ab"})
    assert (turn.suspend, turn.extend) == ((), ((young, 2), (old, 7)))
    turn = decided([young, old], [], holding(10, (young, 2), (old, 6)), PLAN, prompts={0: "ab", 1: "ab"})
    assert (turn.suspend, turn.extend) == ((old,), ((young, 2),))


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("restore_steps", [1, 5])
def test_ten_thousand_operations_under_pressure_lose_no_page_and_starve_no_sequence(seed, restore_steps):
    """Ten thousand over all seeds: each run does its share of operations, until every sequence has finished."""
    rng = random.Random(seed)
    pressure = VirtualPressure(rng.randint(20, 60), PLAN, restore_steps=restore_steps)
    arrivals = 0
    while pressure.operations < 500:
        for _ in range(rng.randint(0, 6)):
            prompt = rng.randint(1, 80)
            new = rng.randint(2, 8 * 20 - prompt)  # the first token comes with the prompt
            pressure.add(sequence(arrivals, prompt=prompt, new=new))
            arrivals += 1
        if pressure.waiting or pressure.running or pressure.restoring:
            pressure.interval()
    pressure.run()
    assert len(pressure.finished) == arrivals
    assert pressure.ledger.free_pages == pressure.ledger.total_pages
    assert pressure.suspensions > 0


@pytest.mark.parametrize("seed", range(4))
def test_the_number_that_may_run_changes_and_boundaries_come_at_random_steps(seed):
    rng = random.Random(seed)
    pressure = VirtualPressure(rng.randint(20, 60), PLAN, restore_steps=2)
    pressure.most_holders = 6  # sequences on their way join, even if fewer may run by then
    for arrival in range(40):
        pressure.add(sequence(arrival, prompt=rng.randint(1, 40), new=rng.randint(2, 60)))
    while pressure.waiting or pressure.running or pressure.restoring:
        pressure.plan = plan(b_moe=rng.randint(1, 6), boundary_tokens=8, page_size=8)
        pressure.preempt()
        pressure.steps(rng.randint(0, 8))
    assert len(pressure.finished) == 40
    assert pressure.ledger.free_pages == pressure.ledger.total_pages


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize(("restore_steps", "to_store"), [(1, True), (5, True), (20, True), (5, False)])
def test_ten_thousand_operations_in_two_exclusive_tiers_lose_no_page_and_starve_no_sequence(
    seed, restore_steps, to_store
):
    """As above, with stores up to the size of the device, and some sequences that are aborted.

    If prompts are computed on the device alone, stores are up to three times as large.
    """
    rng = random.Random(seed)
    device = rng.randint(20, 60)
    store = rng.randint(1, device if to_store else 3 * device)
    tiers = VirtualTwoTiers(device, store, PLAN, restore_steps=restore_steps, to_store=to_store)
    arrivals = 0
    while tiers.operations < 300:
        for _ in range(rng.randint(0, 6)):
            prompt = rng.randint(1, 80)
            tiers.queue.append(sequence(arrivals, prompt=prompt, new=rng.randint(2, 8 * 20 - prompt)))
            arrivals += 1
        if tiers.busy:
            tiers.interval()
        ended = [*tiers.running, *tiers.waiting]
        if ended and rng.random() < 0.1:
            tiers.abort(rng.choice(ended))
    tiers.run()
    assert len(tiers.finished) == arrivals
    assert tiers.ledger.free_pages == tiers.ledger.total_pages
    assert not tiers.store_blocks
    assert not tiers.account.reserved_pages
    assert tiers.stayed > 0
