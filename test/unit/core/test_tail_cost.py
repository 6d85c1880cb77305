"""In which sets of ranks the last sequences end soonest, by what can be known of them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sequence_builders import plan

from sgl_batch.core.ended_lengths import EndedLengths
from sgl_batch.core.tail_cost import LongTail, Sets, Straggler, expected_left, remaining_s

CHANGE_S = 0.1
PLAN = plan(b_moe=8, page_size=16)


@dataclass(frozen=True, slots=True, kw_only=True)
class LineSteps:
    """Seconds of steps that grow as a line with their work."""

    fixed_s: float = 1e-3
    row_s: float = 1e-5
    context_s: float = 1e-8

    def step_s(self, *, rows: int, kv_tokens: int, all_rows: int, streams: bool) -> float:
        return self.fixed_s + rows * self.row_s + kv_tokens * self.context_s

    def move_s(self, tokens: float) -> float:
        return tokens * 1e-6


def shared(ranks: int, fixed_s: float = 2e-4) -> LineSteps:
    """Return costs of a set that has a part of each row's work on each rank, and less that does not depend on rows."""
    whole = LineSteps()
    return LineSteps(fixed_s=fixed_s, row_s=whole.row_s / ranks, context_s=whole.context_s / ranks)


def tail(ranks: int, *sizes: int, change_s: float = CHANGE_S, tokens: int = 1 << 20, fixed_s: float = 2e-4) -> LongTail:
    sets = [Sets(count=ranks // size, ranks=size, costs=shared(size, fixed_s), tokens=tokens) for size in sizes]
    return LongTail(ranks=ranks, costs=LineSteps(), sets=sets, change_s=change_s)


def stragglers(count: int, *, generated: int = 10, most: int = 1000) -> list[Straggler]:
    return [Straggler(generated=generated, most=most, kv_tokens=50 + generated) for _ in range(count)]


def test_what_is_left_is_expected_from_outputs_that_were_longer():
    ended = EndedLengths([400, 10, 100, 200])
    running = [
        Straggler(generated=50, most=1000, kv_tokens=80),
        Straggler(generated=200, most=1000, kv_tokens=300),
        Straggler(generated=500, most=1000, kv_tokens=600),
        Straggler(generated=50, most=60, kv_tokens=80),
    ]
    # The mean of 100, 200 and 400; of 400; half of what the limit leaves; no more than the limit leaves.
    assert expected_left(running, ended) == pytest.approx([700 / 3 - 50, 200, 250, 10])
    assert expected_left(running[:1], EndedLengths()) == pytest.approx([475])


def test_remaining_time_adds_up_steps_of_ever_fewer_sequences():
    costs = LineSteps(context_s=0.0)
    found = remaining_s([10.0, 30.0, 20.0], 300, 2, costs, shared=False)
    two, one = (costs.step_s(rows=rows, kv_tokens=0, all_rows=rows, streams=False) for rows in (2, 1))
    assert found == pytest.approx(10 * two + 20 * one)


@settings(deadline=None)
@given(
    left=st.lists(st.floats(1, 500), min_size=1, max_size=30),
    times=st.integers(1, 5),
    parts=st.integers(1, 8),
    shared=st.booleans(),
)
def test_a_sequence_that_stands_for_several_counts_as_often(left, times, parts, shared):
    repeated = [one for one in left for _ in range(times)]
    whole = remaining_s(repeated, 900, parts, LineSteps(), shared=shared)
    assert remaining_s(left, 900, parts, LineSteps(), shared=shared, times=times) == pytest.approx(whole)


def test_sets_are_chosen_where_the_change_is_worth_it():
    long, short, plan = EndedLengths([2000] * 4), EndedLengths([40] * 4), PLAN
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
    ended, running = EndedLengths([2000]), stragglers(2, most=4000)
    both = tail(4, 2, 4)
    slow = replace(both.sets[1], costs=shared(4, fixed_s=9e-4))
    chosen = replace(both, sets=[both.sets[0], slow]).best(running, ended, PLAN)
    assert chosen is not None
    assert chosen.ranks == 2


def test_a_simulated_rank_that_stands_for_others_decides_as_all_of_them():
    ended = EndedLengths([900])
    for most in (950, 2000):
        whole = tail(4, 2, 4).best(stragglers(8, most=most), ended, PLAN)
        one = replace(tail(4, 2, 4), alike=4).best(stragglers(2, most=most), ended, PLAN)
        assert (whole is None) == (one is None)
        assert whole is None or one is None or whole.ranks == one.ranks
