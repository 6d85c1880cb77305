"""Simulated ranks: every sequence ends, nothing is lost, decisions are those of core, and time is what passes cost."""

from __future__ import annotations

import made_runs as made
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_batch.core.rank_moves import Migration
from sgl_batch.core.replay import replay_trace
from sgl_batch.simulator.instance import Instance
from sgl_batch.simulator.kv_forms import RankPages, make_form
from sgl_batch.simulator.rank import SimulatedRank
from sgl_batch.simulator.scheduler import Ours

FORMS = [
    ("device", "reserve"),
    ("device", "forecast"),
    ("device", "two-page"),
    ("inclusive", "reserve"),
    ("inclusive", "forecast"),
    ("exclusive", "reserve"),
    ("streamed", "reserve"),
    ("streamed by choice", "reserve"),
]


def check_done(run, asked):
    """Every sequence has ended once, with all its tokens, and every page has come back."""
    tallies = [rank.tally for rank in run.ranks]
    assert sum(tally.finished for tally in tallies) == len(asked)
    assert sum(tally.output_tokens for tally in tallies) == int(asked.outputs.sum())
    assert sum(tally.prompt_tokens for tally in tallies) == int(asked.prompts.sum())
    assert sum(tally.again for tally in tallies) == 0, "no prompt is computed twice"
    for rank in run.ranks:
        assert rank.form.device.reserved_pages == 0
        assert rank.form.admission.reserved_pages == 0


@pytest.mark.parametrize(("form", "admission"), FORMS)
@pytest.mark.parametrize("ranks", [1, 3])
def test_every_sequence_ends_in_every_form_of_kv(form, admission, ranks):
    asked = made.requests(made.some_lengths(40 * ranks), spare=40)
    run = made.instance(asked, made.plan(), form=form, admission=admission, ranks=ranks)
    account = run.run()
    check_done(run, asked)
    assert account.seconds == pytest.approx(sum(account.parts.values()))
    assert account.timeline.running, "what ran is known over time"


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 90), st.integers(1, 90)), min_size=1, max_size=30),
    form=st.sampled_from(FORMS),
    ranks=st.sampled_from([1, 2, 4]),
    pages=st.integers(12, 40),
    spare=st.sampled_from([0, 10]),
    mix=st.sampled_from([0, 32]),
    migration=st.sampled_from(list(Migration)),
)
def test_tokens_and_pages_are_conserved(lengths, form, ranks, pages, spare, mix, migration):
    asked = made.requests(lengths, spare=spare)
    mix = 0 if ranks > 1 else mix
    memory = RankPages(device=pages, store=4 * pages)
    run = made.instance(
        asked,
        made.plan(mix=mix),
        form=form[0],
        admission=form[1],
        ranks=ranks,
        memory=memory,
        migration=migration,
    )
    run.run()
    check_done(run, asked)


@settings(max_examples=30, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 60), st.integers(1, 60)), min_size=1, max_size=24),
    form=st.sampled_from(FORMS),
    ranks=st.sampled_from([1, 2]),
    slower=st.floats(1.0, 8.0),
)
def test_slower_hardware_is_never_faster(lengths, form, ranks, slower):
    """All seconds grow by one factor, so that decisions, which see modelled time only by copies, stay the same."""
    asked, base = made.requests(lengths), made.LineCosts()
    slow = made.LineCosts(**{name: getattr(base, name) * slower for name in base.__slots__ if name.endswith("_s")})
    seconds = [
        made.instance(asked, made.plan(), form=form[0], admission=form[1], ranks=ranks, costs=costs).run().seconds
        for costs in (base, slow)
    ]
    assert seconds[1] == pytest.approx(slower * seconds[0])


@settings(max_examples=30, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 60), st.integers(1, 60)), min_size=1, max_size=24),
    form=st.sampled_from(FORMS),
    ranks=st.sampled_from([1, 2]),
)
def test_time_is_never_below_what_the_work_takes(lengths, form, ranks):
    asked, costs = made.requests(lengths), made.LineCosts()
    account = made.instance(asked, made.plan(), form=form[0], admission=form[1], ranks=ranks).run()
    rows = int(asked.outputs.sum()) - len(asked)  # prefill gives the first token of each
    work_s = int(asked.prompts.sum()) * costs.prompt_s + rows * costs.row_s
    longest_s = (int(asked.outputs.max()) - 1) * costs.fixed_s
    assert account.seconds >= work_s / ranks - 1e-9
    assert account.seconds >= longest_s - 1e-9


@pytest.mark.parametrize("form", ["device", "inclusive", "exclusive", "streamed"])
def test_decisions_in_modelled_time_replay_as_those_of_an_engine(form):
    asked = made.requests(made.some_lengths(60))
    recorded = made.Recorded(form)
    run = made.instance(asked, made.plan(), form=form, scheduler=recorded)
    run.run()
    check_done(run, asked)
    count, differences = replay_trace(recorded.events)
    assert count == len(recorded.events) > 20
    assert differences == []


def test_a_pass_lasts_as_long_as_its_busiest_rank():
    lengths = [(16, 60), (16, 2)] * 8
    even = made.instance(made.requests(lengths), made.plan(), ranks=1)
    apart = made.instance(made.requests(lengths), made.plan(), ranks=2, migration=Migration.NEVER)
    levelled = made.instance(made.requests(lengths), made.plan(), ranks=2)
    seconds = [one.run().seconds for one in (apart, levelled)]
    even.run()
    assert apart.account.idle > levelled.account.idle, "one of two ranks has the long outputs until some move"
    assert seconds[1] < seconds[0]
    assert even.account.idle == 0


@pytest.mark.parametrize("form", ["device", "inclusive"])
def test_a_boundary_takes_its_time_once_however_many_ranks_cross_it(form):
    alone = made.requests([(16, 60), (20, 9), (33, 40), (5, 70)] * 3)
    several = made.requests([pair for pair in [(16, 60), (20, 9), (33, 40), (5, 70)] * 3 for _ in range(4)])
    costs = made.LineCosts(boundary_s=0.5)
    seconds, free = [], []
    for asked, ranks in ((alone, 1), (several, 4)):
        run = made.instance(asked, made.plan(), form=form, ranks=ranks, costs=costs)
        account = run.run()
        crossed = account.parts["boundary"] / 0.5
        assert crossed == pytest.approx(round(crossed))
        assert 60 / made.plan().boundary_tokens <= crossed <= run.ranks[0].boundaries
        seconds.append(account.parts["boundary"])
        free.append(made.instance(asked, made.plan(), form=form, ranks=ranks).run().parts["boundary"])
    assert free == [0, 0]
    if form == "device":
        assert seconds[0] == seconds[1]


def test_the_last_sequences_are_spread_evenly_over_the_ranks():
    lengths = [(16, 90), (16, 10)] * 8
    run = made.instance(made.requests(lengths), made.plan(), ranks=2, memory=RankPages(device=100))
    run.run(until=0.04)
    assert sorted(len(rank.running) for rank in run.ranks) == [4, 4]


def test_more_of_one_sequence_than_memory_is_refused():
    asked = made.requests([(16, 16), (2000, 16), (16, 16)])
    run = made.instance(asked, made.plan(), memory=RankPages(device=20))
    run.run()
    assert run.ranks[0].tally.finished == 2
    assert run.ranks[0].tally.refused == 1


def test_sequences_that_arrive_later_run_later():
    asked, plan = made.requests([(16, 16)] * 4), made.plan()
    rank = SimulatedRank(asked, [0, 1], plan, make_form("device", RankPages(device=60), made.PAGE), request_slots=64)
    later = [(0.5, 2), (1.0, 3)]

    def arrive(now: float) -> float:
        while later and later[0][0] <= now:
            rank.arrive(later.pop(0)[1])
        return later[0][0] if later else float("inf")

    account = Instance([rank], plan, Ours(rank.form.policy), made.LineCosts(), arrivals=arrive).run()
    assert rank.tally.finished == len(asked)
    assert account.seconds > 1.0
    assert account.parts["arrivals"] > 0.5
