"""Batches in rounds: what a round waits for, how many problems are worked on at once, and what prompts hold."""

from __future__ import annotations

import made_runs as made
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_batch.simulator.best import best_of
from sgl_batch.simulator.cluster.hardware import cluster_named
from sgl_batch.simulator.cluster.models import model_named
from sgl_batch.simulator.policies import policies_named
from sgl_batch.simulator.rounds import Problems, Rounds, filling
from sgl_batch.simulator.run import simulate


def rounds_of(*, problems=5, at_once=2, rounds=3, candidates=4, question=10, output=12):
    return Rounds(
        question=question,
        output=output,
        rounds=rounds,
        candidates=candidates,
        aggregate=2,
        problems=problems,
        at_once=at_once,
    )


@given(problems=st.integers(1, 9), at_once=st.integers(1, 4), rounds=st.integers(1, 4), candidates=st.integers(1, 5))
def test_every_candidate_has_a_number_of_its_own(problems, at_once, rounds, candidates):
    made_rounds = rounds_of(problems=problems, at_once=at_once, rounds=rounds, candidates=candidates)
    count = len(made_rounds.requests())
    whole = count // (rounds * candidates)
    assert whole >= problems
    numbered = {
        number: (problem, at)
        for problem in range(whole)
        for at in range(rounds)
        for number in made_rounds.numbers(problem, at)
    }
    assert sorted(numbered) == list(range(count))
    assert all(made_rounds.place(number) == place for number, place in numbered.items())


def test_later_prompts_hold_outputs_of_the_round_before():
    made_rounds = rounds_of(question=100, output=400)
    found = made_rounds.requests(cv=0.4)
    before, later = (list(made_rounds.numbers(3, at)) for at in (0, 1))
    assert np.ptp(found.outputs) > 0
    assert list(found.prompts[before]) == [100] * 4
    for place, number in enumerate(later):
        held = sum(int(found.outputs[before[(place + step) % 4]]) for step in range(2))
        assert found.prompts[number] == 100 + held


class Watched:
    """The problems of an instance, and what has come and ended, by number."""

    def __init__(self, rounds, *, ranks, cv):
        self.requests = rounds.requests(cv)
        self.instance = made.instance(self.requests, made.plan(), ranks=ranks, numbers=())
        self.rounds, self.come, self.ended = rounds, [], []
        self.problems = Problems(rounds, self.instance.ranks, range(rounds.problems), rounds.at_once)
        for rank in self.instance.ranks:
            rank.on_end = self._end

    def _end(self, sequence):
        self.ended.append(int(sequence.sequence_id))
        self.problems.note_end(sequence)

    def __call__(self, now):
        for number in [number for numbers in self.problems.due for number in numbers]:
            problem, at = self.rounds.place(number)
            if at:
                assert set(self.rounds.numbers(problem, at - 1)) <= set(self.ended)
            self.come.append(number)
        open_problems = {self.rounds.place(number)[0] for number in self.come if number not in self.ended}
        assert len(open_problems) <= self.rounds.at_once
        return self.problems(now)


@settings(max_examples=15, deadline=None)
@given(ranks=st.integers(1, 3), at_once=st.integers(1, 4), cv=st.sampled_from([0.0, 0.6]))
def test_a_round_waits_for_the_one_before_and_a_problem_for_its_turn(ranks, at_once, cv):
    watched = Watched(rounds_of(problems=2 * at_once, at_once=at_once), ranks=ranks, cv=cv)
    watched.instance.feed(watched)
    watched.instance.run()
    assert sorted(watched.come) == sorted(watched.ended) == list(range(len(watched.requests)))
    assert watched.problems.ended == 2 * at_once


def test_as_many_problems_begin_as_fill_the_ranks_and_more():
    some = filling(rounds_of(candidates=4), rows=36, instances=2)
    assert [one.at_once for one in some] == [10, 14, 18]
    assert filling(rounds_of(), rows=1, instances=3)[0].at_once == 3


@pytest.mark.parametrize("policy", ["batchgen", "sglang"])
def test_instances_work_on_problems_of_their_own(policy):
    rounds = rounds_of(problems=8, at_once=4, question=100, output=40)
    best = best_of(
        policies_named(f"{policy}:1")[0], model_named("qwen3-30b-a3b"), cluster_named("h100x2"), rounds.requests()
    )
    setup = best.result.setup
    whole = simulate(setup, rounds.requests(), rounds=rounds)
    assert whole.counts.finished == len(rounds.requests()) == 8 * 3 * 4
    assert whole.simulated == 2
    assert whole.seconds > best.result.seconds  # rounds wait
    part = simulate(setup, rounds.requests(), rounds=rounds, until=0.5 * whole.seconds)
    assert 0 < part.counts.finished < whole.counts.finished
    assert part.seconds == pytest.approx(0.5 * whole.seconds, rel=0.05)
    assert "4 problems" in part.notes[0]
