"""Reservations that grow: the account's inequality, who is extended, who waits and borrows, and that all end."""

from __future__ import annotations

import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from sequence_builders import plan, sequence
from virtual_growth import VirtualGrowth

from sgl_batch.core.admission import Admission, first_pages, select_prefill_group
from sgl_batch.core.admission_policy import RESERVE, AdmissionPolicy, Forecast, Reserve, TwoPage, make_admission
from sgl_batch.core.growth import GrowthTrial, carry_out
from sgl_batch.core.page_ledger import PageLedger
from sgl_batch.core.replay import replay

PLAN = plan(b_moe=8, boundary_tokens=8, page_size=8, b_moe_prefill=200)
OWNERS = [f"s{i}" for i in range(6)]


class GrowingReservationsAgainstAModel(RuleBasedStateMachine):
    """Random reservations, extensions and loans beside plain dictionaries."""

    TOTAL = 20

    def __init__(self):
        super().__init__()
        self.ledger = PageLedger(self.TOTAL, 8, policy=TwoPage())
        self.held: dict[str, int] = {}
        self.whole: dict[str, int] = {}

    def _allowed(self, held: dict[str, int], whole: dict[str, int]) -> bool:
        gap = max((whole[name] - pages for name, pages in held.items()), default=0)
        return sum(held.values()) + gap <= self.TOTAL

    @rule(owner=st.sampled_from(OWNERS), pages=st.integers(0, 12), gap=st.integers(0, 12))
    def reserve(self, owner, pages, gap):
        held, whole = {**self.held, owner: pages}, {**self.whole, owner: pages + gap}
        if owner in self.held or not self._allowed(held, whole):
            with pytest.raises(AssertionError, match=owner):
                self.ledger.reserve(owner, pages, whole=pages + gap)
        else:
            assert self.ledger.fits(pages, gap=gap)
            self.ledger.reserve(owner, pages, whole=pages + gap)
            self.held, self.whole = held, whole

    @rule(owner=st.sampled_from(OWNERS), more=st.integers(0, 12))
    def extend(self, owner, more):
        if owner not in self.held:
            return
        held = {**self.held, owner: self.held[owner] + more}
        fits = held[owner] <= self.whole[owner] and self._allowed(held, self.whole)
        assert self.ledger.can_resize(owner, held[owner]) is fits
        if fits:
            self.ledger.resize(owner, held[owner])
            self.held = held

    @rule(owner=st.sampled_from(OWNERS))
    def release(self, owner):
        if owner in self.held:
            assert self.ledger.release(owner) == self.held.pop(owner)
            del self.whole[owner]

    @rule(owner=st.sampled_from(OWNERS))
    def stall_or_lend(self, owner):
        if owner in self.held and self.ledger.borrower is None:
            self.ledger.lend(owner)
        elif owner in self.held and owner != self.ledger.borrower:
            self.ledger.stall(owner, 0)

    @invariant()
    def it_is_as_the_model_says(self):
        assert self.ledger.reservations() == self.held
        assert self.ledger.needs() == self.whole
        assert self._allowed(self.held, self.whole)
        assert self.ledger.stalled.keys() <= self.held.keys()
        assert self.ledger.borrower is None or self.ledger.borrower in self.held
        copy = self.ledger.copy()
        assert (copy.reservations(), copy.free_pages) == (self.held, self.ledger.free_pages)


GrowingReservationsAgainstAModel.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestGrowingReservations = GrowingReservationsAgainstAModel.TestCase


def test_a_sequence_reserves_its_prompt_and_two_pages_or_its_expected_output():
    one = sequence(0, prompt=20, new=400)
    assert first_pages(one, PageLedger(100, 8), PLAN) == 53
    assert first_pages(one, PageLedger(100, 8, policy=TwoPage()), PLAN) == 5
    one.expected_tokens = 100
    assert first_pages(one, PageLedger(100, 8, policy=Forecast()), PLAN) == 15
    one.expected_tokens = 4000
    assert first_pages(one, PageLedger(100, 8, policy=Forecast()), PLAN) == 53, "no more than it can need"


def test_a_forecast_knows_nothing_before_the_first_output_and_the_mean_then():
    policy, one = Forecast(), sequence(0, new=1000)
    assert policy.expected_tokens(one) == 1000
    for length in (40, 60, 80):
        policy.finished(sequence(1), length)
    assert policy.expected_tokens(one) == 60
    assert policy.expected_tokens(sequence(2, new=30)) == 30


def test_a_forecast_prefers_the_outputs_of_the_same_prompt():
    policy = Forecast()
    policy.finished(sequence(1), 100)
    policy.finished(sequence(2, group="g"), 20)
    assert policy.expected_tokens(sequence(3, group="g", new=1000)) == 20
    assert policy.expected_tokens(sequence(4, group="h", new=1000)) == 60


def test_policies_are_made_by_name():
    names = ("reserve", "two-page", "forecast", "auto")
    on_cpu = [type(make_admission(name, on_cpu=True)) for name in names]
    on_gpu = [type(make_admission(name, on_cpu=False)) for name in names]
    assert make_admission("auto", on_cpu=True, exclusive_store=True) is RESERVE
    assert (on_cpu, on_gpu) == ([Reserve, TwoPage, Forecast, Forecast], [Reserve, TwoPage, Forecast, Reserve])


def test_admission_keeps_room_for_one_sequence_to_grow_to_its_end():
    units = [Admission(leader=sequence(i, prompt=8, new=73)) for i in range(9)]  # 3 of 10 pages each
    ledger = PageLedger(20, 8, policy=TwoPage())
    assert len(select_prefill_group(units, ledger, b_moe=1000, free_request_slots=99, plan=PLAN)) == 4, "12 + 7 of 20"
    ledger.reserve("waits", 1, whole=1)
    ledger.stall("waits", 0)
    assert select_prefill_group(units, ledger, b_moe=1000, free_request_slots=99, plan=PLAN) == []


def outgrown(*generated: int, pages: int) -> tuple[GrowthTrial, list]:
    """Sequences with 3 pages reserved, and so many tokens generated that they may need more; tried in their order."""
    ledger = PageLedger(pages, 8, policy=TwoPage())
    made = [sequence(i, prompt=8, new=73) for i in range(len(generated))]
    for one, tokens in zip(made, generated, strict=True):
        ledger.reserve(one.sequence_id, 3, whole=10)
        one.generated_tokens = tokens
    trial = GrowthTrial(ledger, PLAN)
    return trial, [trial.may_run(one) for one in made]


def test_reservations_grow_by_pages_while_one_can_still_grow_to_its_end():
    trial, may = outgrown(1, 9, 9, pages=18)
    assert may == [True, True, True]
    assert [number for _, number in trial.grow()[0].pages] == [4, 4]
    trial, may = outgrown(1, 9, 9, pages=17)
    assert may == [True, True, False], "3 + 4 + 4 and a gap of 7"


def test_one_that_cannot_be_extended_borrows_and_only_one():
    trial, may = outgrown(9, 9, pages=13)
    assert may == [False, False]
    first, second = trial.lacking
    assert trial.lend() is first
    assert trial.lend() is None
    assert trial.lacking == [second]
    (grow,) = trial.grow()
    assert (grow.borrower, grow.stalled, grow.pages) == (first, (second,), ())


def test_a_loan_takes_the_growth_that_ended_the_one_before_it():
    """Also where the former borrower is not among those that run, for whose extensions `grow` is asked."""
    ledger = PageLedger(23, 8, policy=TwoPage())
    ledger.reserve("has the largest gap", 3, whole=16)
    former, lacks = (sequence(i, prompt=8, new=73) for i in range(2))
    for one in (former, lacks):
        ledger.reserve(one.sequence_id, 3, whole=10)
        one.generated_tokens = 9
    ledger.lend(former.sequence_id)
    trial = GrowthTrial(ledger, PLAN)
    assert (trial.may_run(former), trial.may_run(lacks)) == (True, False)
    assert trial.lend() is lacks
    (grow,) = trial.grow([lacks])
    carry_out(grow, ledger)
    assert ledger.borrower == lacks.sequence_id
    assert ledger.held(former.sequence_id) == 4


POLICIES: list[type[AdmissionPolicy]] = [TwoPage, Forecast]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(("store_pages", "overflow_pages"), [(None, 0), (None, 25), (None, 1000), (30, 0), (80, 0)])
@pytest.mark.parametrize("seed", range(4))
def test_whatever_the_lengths_all_end_nothing_runs_out_and_decisions_replay(policy, store_pages, overflow_pages, seed):
    rng = random.Random(seed)
    rank = VirtualGrowth(
        rng.randint(22, 50),
        PLAN,
        policy(),
        store_pages=store_pages,
        overflow_pages=overflow_pages,
        restore_steps=rng.randint(1, 9),
    )
    for _ in range(40):
        prompt = rng.randint(1, 60)
        most = rng.randint(2, 8 * 20 - prompt)
        length = most if rng.random() < 0.3 else rng.randint(1, most)
        rank.add(prompt=prompt, new=most, length=length)
    while rank.busy:
        rank.step()
        alive = [*rank.running, *rank.ready.values()]
        if alive and rng.random() < 0.01:
            rank.abort(rng.choice(alive))
    assert len(rank.finished) == 40
    assert rank.account.free_pages == rank.account.total_pages
    assert (rank.account.borrower, rank.account.stalled, rank.account.away) == (None, {}, set())
    assert (rank.overflowed > 0) is (rank.suspensions > 0 and overflow_pages > 0)
    assert rank.suspensions + rank.lent > 0 or policy is Forecast
    assert list(replay(rank.records)) == []


@pytest.mark.parametrize("policy", POLICIES)
def test_more_run_at_once_where_answers_are_shorter_than_they_could_be(policy):
    def steps_and_runners(made: AdmissionPolicy) -> tuple[int, int]:
        rank = VirtualGrowth(60, PLAN, made)
        rng = random.Random(0)
        for _ in range(100):
            rank.add(prompt=8, new=150, length=min(150, 2 + int(rng.expovariate(1 / 12))))
        rank.run()
        return rank.total_steps, rank.most_running

    class ReserveInTheSameAccount(Reserve):
        grows = True

        def expected_tokens(self, sequence):
            return sequence.max_new_tokens

    reserved, grown = steps_and_runners(ReserveInTheSameAccount()), steps_and_runners(policy())
    assert grown[0] < 0.6 * reserved[0]
    assert grown[1] > 2 * reserved[1]


def test_what_has_waited_longest_borrows_first():
    """Eight that outgrow a small device end in the order of their arrival."""
    rank = VirtualGrowth(24, PLAN, TwoPage())
    for _ in range(6):
        rank.add(prompt=8, new=150, length=150)
    rank.run()
    assert [one.arrival for one in rank.finished] == list(range(6))
