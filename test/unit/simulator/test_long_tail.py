"""The last sequences of a batch go on in sets of ranks where they end sooner so, by what can be known of them."""

from __future__ import annotations

from dataclasses import replace

import made_runs as made
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_batch.simulator.kv_forms import RankPages
from sgl_batch.simulator.long_tail import LongTail, Sets, Straggler, expected_left, remaining_s
from sgl_batch.simulator.work import PassWork

CHANGE_S = 0.1
ROOMY = RankPages(device=400, store=800)


def shared(ranks: int, fixed_s: float = 2e-4) -> made.LineCosts:
    """Return costs of a set that has a part of each row's work on each rank, and less that does not depend on rows."""
    whole = made.LineCosts()
    return replace(
        whole, fixed_s=fixed_s, row_s=whole.row_s / ranks, context_s=whole.context_s / ranks, move_s=whole.move_s
    )


def tail(ranks: int, *sizes: int, change_s: float = CHANGE_S, tokens: int = 1 << 20, fixed_s: float = 2e-4) -> LongTail:
    sets = [Sets(count=ranks // size, ranks=size, costs=shared(size, fixed_s), tokens=tokens) for size in sizes]
    return LongTail(ranks=ranks, costs=made.LineCosts(), sets=sets, change_s=change_s)


def stragglers(count: int, *, generated: int = 10, most: int = 1000) -> list[Straggler]:
    return [Straggler(generated=generated, most=most, kv_tokens=50 + generated) for _ in range(count)]


def test_what_is_left_is_expected_from_outputs_that_were_longer():
    ended = np.array([400, 10, 100, 200])
    running = [
        Straggler(generated=50, most=1000, kv_tokens=80),
        Straggler(generated=200, most=1000, kv_tokens=300),
        Straggler(generated=500, most=1000, kv_tokens=600),
        Straggler(generated=50, most=60, kv_tokens=80),
    ]
    # The mean of 100, 200 and 400; of 400; half of what the limit leaves; no more than the limit leaves.
    assert expected_left(running, ended) == pytest.approx([700 / 3 - 50, 200, 250, 10])
    assert expected_left(running[:1], ended[:0]) == pytest.approx([475])


def test_remaining_time_adds_up_steps_of_ever_fewer_sequences():
    costs = made.LineCosts(context_s=0.0)
    found = remaining_s(np.array([10.0, 30.0, 20.0]), 300, 2, costs, shared=False)
    two, one = (costs.of_pass(PassWork(rows=rows)).seconds for rows in (2, 1))
    assert found == pytest.approx(10 * two + 20 * one)


def test_sets_are_chosen_where_the_change_is_worth_it():
    long, short, plan = np.array([2000] * 4), np.array([40] * 4), made.plan()
    running = stragglers(3, most=4000)
    chosen = tail(4, 4).best(running, long, plan)
    assert chosen is not None
    assert chosen.ranks == 4
    assert tail(4, 4).best(running, short, plan) is None, "they end before the change has paid"
    assert tail(4, 4, change_s=60.0).best(running, long, plan) is None
    assert tail(4, 4, fixed_s=2e-3).best(running, long, plan) is None, "shared steps take longer"
    assert tail(4, 4, tokens=1000).best(running, long, plan) is None, "what they may generate does not fit"
    assert tail(4, 4).best(stragglers(plan.decode.b_moe + 1, most=4000), long, plan) is None, "not all run at once"
    assert tail(4).best(running, long, plan) is None


def test_the_faster_of_several_sizes_is_chosen():
    ended, running = np.array([2000]), stragglers(2, most=4000)
    both = tail(4, 2, 4)
    slow = replace(both.sets[1], costs=shared(4, fixed_s=9e-4))
    chosen = replace(both, sets=[both.sets[0], slow]).best(running, ended, made.plan())
    assert chosen is not None
    assert chosen.ranks == 2


def test_a_simulated_rank_that_stands_for_others_decides_as_all_of_them():
    ended = np.array([900])
    for most in (950, 2000):
        whole = tail(4, 2, 4).best(stragglers(8, most=most), ended, made.plan())
        one = replace(tail(4, 2, 4), alike=4).best(stragglers(2, most=most), ended, made.plan())
        assert (whole is None) == (one is None)
        assert whole is None or one is None or whole.ranks == one.ranks


def test_one_long_sequence_ends_sooner():
    asked = made.requests([(16, 20)] * 15 + [(16, 600)])
    runs = [
        made.instance(asked, made.plan(), ranks=4, memory=ROOMY, long_tail=tail(4, 4) if on else None)
        for on in (False, True)
    ]
    seconds = [run.run().seconds for run in runs]
    found = runs[1].account.partitioned
    assert found is not None
    assert (found.sequences, found.ranks) == (1, 4)
    assert runs[1].account.parts["partition"] == CHANGE_S
    assert seconds[1] < 0.6 * seconds[0]
    assert sum(rank.tally.finished for rank in runs[1].ranks) == len(asked)


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 60), st.integers(1, 40)), min_size=1, max_size=24),
    long=st.lists(st.integers(100, 500), max_size=6),
    form=st.sampled_from(["device", "inclusive", "streamed"]),
    ranks=st.sampled_from([2, 4]),
    spare=st.sampled_from([0, 30]),
)
def test_tokens_are_conserved_and_little_time_is_lost(lengths, long, form, ranks, spare):
    """A step of sets is never longer here than that of all ranks, so that what can be lost is the change itself."""
    asked = made.requests([*lengths, *((20, output) for output in long)], spare=spare)
    seconds, moved_s = [], 0.0
    for long_tail in (None, tail(ranks, 2, ranks)):
        run = made.instance(asked, made.plan(), form=form, ranks=ranks, memory=ROOMY, long_tail=long_tail)
        account = run.run()
        tallies = [rank.tally for rank in run.ranks]
        assert sum(one.finished for one in tallies) == len(asked)
        assert sum(one.output_tokens for one in tallies) == int(asked.outputs.sum())
        assert sum(one.prompt_tokens for one in tallies) == int(asked.prompts.sum())
        assert all(rank.is_empty and not rank.form.device.reserved_pages for rank in run.ranks)
        assert account.seconds == pytest.approx(sum(account.parts.values()))
        seconds.append(account.seconds)
        moved_s = account.parts["copies"]
    assert seconds[1] <= seconds[0] + CHANGE_S + moved_s + 1e-9


@settings(max_examples=20, deadline=None)
@given(count=st.integers(1, 40), length=st.integers(1, 300), ranks=st.sampled_from([2, 4]))
def test_where_all_lengths_are_equal_nothing_is_lost(count, length, ranks):
    asked = made.requests([(16, length)] * count)
    seconds = [
        made.instance(asked, made.plan(), ranks=ranks, memory=ROOMY, long_tail=one).run().seconds
        for one in (None, tail(ranks, ranks))
    ]
    assert seconds[1] <= seconds[0] * 1.001
