"""Policies of other engines: what they keep, what they compute again, and where they wait."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from linear_costs import PAGE, plan, requests, run_checked, total

from sgl_batch.core.admission_policy import RESERVE
from sgl_batch.planner.candidate import DEVICE
from sgl_batch.simulator.kv_forms import RankPages, make_form
from sgl_batch.simulator.rank import SimulatedRank
from sgl_batch.simulator.requests import Requests
from sgl_batch.simulator.rivals.lazy_pages import LazyPages
from sgl_batch.simulator.rivals.static_binding import DecodeFirst, PrefillFirst, PrefillTogether
from sgl_batch.simulator.rivals.static_block import StaticBlock
from sgl_batch.simulator.rivals.token_ratio import TokenRatio

POLICIES = {
    "prefill first": PrefillFirst,
    "prefill together": PrefillTogether,
    "decode first": DecodeFirst,
    "block": StaticBlock,
}
LENGTHS = st.tuples(st.integers(1, 120), st.integers(1, 60), st.integers(0, 40))


def ranks_of(
    policy: str, given_requests: Requests, the_plan, *, pages: int, count: int = 1, conservativeness: float = 1.0
) -> list[SimulatedRank]:
    def form():
        if policy == "block":
            return make_form(DEVICE, RankPages(device=pages), PAGE)
        is_sglang = policy.startswith("prefill")
        return LazyPages(pages, PAGE, TokenRatio(conservativeness) if is_sglang else RESERVE, waits_last=is_sglang)

    numbers = range(len(given_requests))
    return [
        SimulatedRank(given_requests, numbers[index::count], the_plan, form(), request_slots=64)
        for index in range(count)
    ]


@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=50, deadline=None)
@given(
    lengths=st.lists(LENGTHS, min_size=1, max_size=30),
    pages=st.integers(8, 60),
    count=st.integers(1, 3),
    chunk=st.sampled_from([16, 24, 64, 500]),
    rows=st.integers(1, 12),
)
def test_every_token_is_generated_once_in_pages_that_are_held(policy, lengths, pages, count, chunk, rows):
    prompts, outputs, further = zip(*lengths, strict=True)
    most = [output + more for output, more in zip(outputs, further, strict=True)]
    made = requests(prompts, outputs, most)
    the_plan = plan(max(chunk, rows + PAGE), rows)
    ranks = ranks_of(policy, made, the_plan, pages=pages, count=count)
    run_checked(ranks, POLICIES[policy](), the_plan)
    fits = [-(-(prompt + limit - 1) // PAGE) <= pages for prompt, limit in zip(prompts, most, strict=True)]
    assert total(ranks, "refused") == fits.count(False)
    assert total(ranks, "finished") == fits.count(True)
    assert total(ranks, "output_tokens") == sum(out for out, fit in zip(outputs, fits, strict=True) if fit)
    computed = sum(prompt for prompt, fit in zip(prompts, fits, strict=True) if fit)
    assert total(ranks, "prompt_tokens") == computed
    assert (total(ranks, "again") > 0) == (total(ranks, "suspensions") > 0)


@pytest.mark.parametrize("policy", ["prefill first", "decode first"])
def test_a_retracted_sequence_computes_all_its_tokens_again(policy):
    made = requests([16, 16], [60, 60])
    the_plan = plan()
    ranks = ranks_of(policy, made, the_plan, pages=60, conservativeness=0.01)
    tight = ranks_of(policy, made, the_plan, pages=14, conservativeness=0.01)
    for one in (ranks, tight):
        run_checked(one, POLICIES[policy](), the_plan)
    assert total(ranks, "again") == 0
    # Both run until neither has a page for the next interval; one then loses its prompt and what it has generated.
    assert total(tight, "suspensions") == 1
    assert 16 < total(tight, "again") < 16 + 60


def test_the_first_prompts_leave_room_for_all_that_they_may_generate():
    made = requests([16, 16], [10, 10], [100, 100])
    ranks = ranks_of("prefill first", made, plan(), pages=20)
    _, costs = run_checked(ranks, PrefillFirst(), plan())
    assert costs.passes[0].prompts == 1
    loose = ranks_of("decode first", made, plan(), pages=20)
    _, costs = run_checked(loose, DecodeFirst(), plan())
    assert costs.passes[0].prompts == 2


def test_the_token_ratio_falls_to_its_least_and_follows_a_retraction():
    ratio = TokenRatio(0.3)
    assert ratio.ratio == pytest.approx(0.21)
    ratio.decoded(300)
    ratio.decoded(300)
    assert ratio.ratio == pytest.approx(0.21 * (1 - 0.86 / 2))
    ratio.begin_interval()
    ratio.decoded(10_000)
    assert ratio.ratio == pytest.approx(0.21 * 0.14)
    one = requests([16], [60], [200]).sequence(0)
    one.generated_tokens = 80
    ratio.retracted([one])
    assert ratio.ratio == pytest.approx(100 / 201)
    assert ratio.expected_tokens(one) == 60
    # The step after a retraction does not count.
    ratio.begin_interval()
    ratio.retracted([one])
    ratio.decoded(1)
    assert ratio.ratio == pytest.approx(100 / 201)


def test_prompts_have_passes_of_their_own_or_share_those_of_decode():
    made = requests([40] * 6, [30] * 6)
    for policy, shares in (("prefill first", False), ("decode first", True)):
        _, costs = run_checked(ranks_of(policy, made, plan(48), pages=200), POLICIES[policy](), plan(48))
        assert any(work.mixed for work in costs.passes) is shares
        assert all(work.prompt_tokens + shares * work.rows <= 48 for work in costs.passes)


def test_a_long_prompt_is_computed_in_chunks_with_all_its_pairs():
    made = requests([100], [2])
    _, costs = run_checked(ranks_of("prefill first", made, plan(32), pages=20), PrefillFirst(), plan(32))
    prompts = [work for work in costs.passes if work.prompts]
    assert [work.prompt_tokens for work in prompts] == [32, 32, 32, 4]
    assert sum(work.prompt_pairs for work in prompts) == 100 * 101 // 2


def test_static_binding_leaves_a_rank_idle_whose_sequences_end_first():
    even, uneven = requests([16] * 8, [40] * 8), requests([16] * 8, [8, 72] * 4)
    idle = []
    for made in (even, uneven):
        ranks = ranks_of("prefill first", made, plan(), pages=200, count=2)
        instance, _ = run_checked(ranks, PrefillFirst(), plan())
        idle.append(instance.account.idle / instance.account.seconds)
    assert idle[0] == pytest.approx(0, abs=1e-9)
    assert 0.3 < idle[1] < 0.5


def test_ranks_that_hold_prompts_back_for_each_other_compute_them_in_fewer_passes():
    outputs = [20 + 7 * number % 31 for number in range(40)]
    made = requests([40] * 40, outputs, [60] * 40)
    passes = {}
    for name in ("prefill first", "prefill together"):
        ranks = ranks_of(name, made, plan(200, rows=4), pages=200, count=4)
        _, costs = run_checked(ranks, POLICIES[name](), plan(200, rows=4))
        passes[name] = sum(work.prompt_tokens > 0 for work in costs.passes)
        assert total(ranks, "finished") == 40
    assert passes["prefill together"] < passes["prefill first"]


def test_nothing_joins_a_block_that_runs():
    made = requests([16] * 5, [10, 30, 10, 10, 10])
    _, costs = run_checked(ranks_of("block", made, plan(rows=2), pages=200), StaticBlock(), plan(rows=2))
    blocks = [work.prompts for work in costs.passes if work.prompts]
    assert blocks == [2, 2, 1]
    assert not any(work.mixed for work in costs.passes)
