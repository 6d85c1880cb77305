"""Owns batches that come in rounds: problems whose candidates of a round are made from those of the round before.

A round's candidates are queued when all of the round before have ended. As many problems are worked on at once as are
chosen; when one has ended, the next begins (recursive self-aggregation).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from sgl_batch.core.sequence import SequenceState
from sgl_batch.planner.workload import Request, Workload
from sgl_batch.simulator.instance import Instance
from sgl_batch.simulator.lengths import requests_like
from sgl_batch.simulator.rank import SimulatedRank
from sgl_batch.simulator.requests import Requests


@dataclass(frozen=True, slots=True, kw_only=True)
class Rounds:
    """How problems are worked on.

    Attributes:
        question, output: Tokens of a problem, and of each candidate on average.
        rounds: Of a problem.
        candidates: Of a round.
        aggregate: Candidates of the round before that a later prompt holds.
        problems: All problems, rounded up to a multiple of `at_once`.
        at_once: Problems that are worked on at the same time.
    """

    question: int
    output: int
    rounds: int
    candidates: int
    aggregate: int
    problems: int
    at_once: int = 1

    def requests(self, cv: float = 0.0) -> Requests:
        """Return the candidates of all problems, about in the order in which they are queued.

        `cv`: the standard deviation of outputs over their mean; prompts have the outputs that they hold. Numbers go by
        blocks of problems that begin together, in these by rounds, and in these by problems.
        """
        blocks = -(-self.problems // self.at_once)
        shape = (blocks, self.rounds, self.at_once, self.candidates)
        count = math.prod(shape)
        drawn = requests_like(Workload(requests=[Request(self.question, self.output)], count=count), count, cv=cv)
        outputs = drawn.outputs.reshape(shape)
        prompts = np.full(shape, self.question, dtype=np.int64)
        for held in range(self.aggregate):
            prompts[:, 1:] += np.roll(outputs[:, :-1], -held, axis=-1)
        return Requests(prompts=prompts.reshape(-1), outputs=drawn.outputs, most=drawn.most)

    def numbers(self, problem: int, at: int) -> range:
        """Return the numbers of a problem's candidates of a round."""
        block, place = divmod(problem, self.at_once)
        first = ((block * self.rounds + at) * self.at_once + place) * self.candidates
        return range(first, first + self.candidates)

    def place(self, number: int) -> tuple[int, int]:
        """Return the problem and the round of a candidate."""
        block, inside = divmod(number // self.candidates, self.rounds * self.at_once)
        at, place = divmod(inside, self.at_once)
        return block * self.at_once + place, at

    def feed(self, instance: Instance, index: int, instances: int) -> None:
        """Give an instance its problems: every `instances`-th one from the `index`-th on, and so many at once."""
        at_once = len(range(index, self.at_once, instances))
        last = -(-self.problems // self.at_once) * self.at_once
        instance.feed(Problems(self, instance.ranks, range(index, last, instances), at_once))


class Problems:
    """Gives the ranks of an instance the candidates of its problems, by turns, round by round (`instance.Arrivals`).

    ended: problems all of whose rounds have ended.
    due: the numbers of the rounds that come with the next call.
    """

    def __init__(self, rounds: Rounds, ranks: Sequence[SimulatedRank], problems: Iterable[int], at_once: int) -> None:
        self.ended = 0
        self._rounds, self._ranks, self._turn = rounds, ranks, 0
        self._waiting = iter(problems)
        self._left: dict[int, int] = {}
        self.due: list[range] = []
        for _ in range(at_once):
            self._begin_next()
        for rank in ranks:
            rank.on_end = self.note_end

    def __call__(self, now: float) -> float:
        """See `instance.Arrivals`. The next ones come when others have ended, not at a time."""
        due, self.due = self.due, []
        for numbers in due:
            for number in numbers:
                self._ranks[self._turn % len(self._ranks)].arrive(number)
                self._turn += 1
        return math.inf

    def _begin_next(self) -> None:
        problem = next(self._waiting, None)
        if problem is not None:
            self._queue(problem, 0)

    def _queue(self, problem: int, at: int) -> None:
        self._left[problem] = self._rounds.candidates
        self.due.append(self._rounds.numbers(problem, at))

    def note_end(self, sequence: SequenceState) -> None:
        """Take in that a candidate has ended; `SimulatedRank.on_end` of all ranks."""
        problem, at = self._rounds.place(int(sequence.sequence_id))
        self._left[problem] -= 1
        if self._left[problem]:
            return
        if at + 1 < self._rounds.rounds:
            self._queue(problem, at + 1)
        else:
            self.ended += 1
            self._begin_next()


def filling(rounds: Rounds, rows: float, instances: int, times: Sequence[float] = (1.0, 1.5, 2.0)) -> list[Rounds]:
    """Return the rounds with as many problems at once as fill `rows` sequences, and with more of them.

    `rows`: that run at once on all ranks together. Candidates of a round wait for the last of the round before, so that
    more problems may keep ranks busy. Each of the `instances` has a problem at least.
    """
    full = rows / rounds.candidates / instances
    return [
        replace(rounds, at_once=count * instances) for count in sorted({max(1, math.ceil(full * x)) for x in times})
    ]
