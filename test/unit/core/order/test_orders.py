"""Each order policy yields every queued sequence once, in its order, and forgets those that are dropped."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Iterator

import pytest
from sequence_builders import plan, sequence
from virtual_schedule import Request, VirtualSchedule

from sgl_batch import config
from sgl_batch.core.order import make_order
from sgl_batch.core.order.abilities import LineMetadata, Prefix, announce, assign, keeps, release
from sgl_batch.core.order.interface import Budgets, OrderPolicy, Side
from sgl_batch.core.order.longest_first import LongestFirst
from sgl_batch.core.sequence import SequenceState

BUDGETS = Budgets(tokens=100, pages=100)


class TwoEnded:
    """A toy policy that takes the longest and the shortest sequence in turn, from both ends of a sorted list.

    Lengths are those that were announced, or else the prompt's. Long sequences are assigned to rank 0. A prefix is kept
    until the last line that was announced with it has ended.
    """

    def __init__(self) -> None:
        self.queued: dict[str, SequenceState] = {}
        self.lengths: list[int] = []
        self.announced: dict[str, LineMetadata] = {}
        self.kept: Counter[Prefix] = Counter()

    def offer(self, sequences: Iterable[SequenceState]) -> None:
        self.queued.update({one.sequence_id: one for one in sequences})

    def take(self, budgets: Budgets) -> Iterator[tuple[SequenceState, Side]]:
        left = sorted(self.queued.values(), key=lambda one: (self._length(one), one.arrival))
        while left:
            yield left.pop(), Side.TAIL
            if left:
                yield left.pop(0), Side.HEAD

    def _length(self, sequence: SequenceState) -> int:
        line = self.announced.get(sequence.sequence_id, LineMetadata(line_id=sequence.sequence_id))
        return (line.prompt_tokens or sequence.prompt_tokens) + (line.predicted_tokens or 0)

    def drop(self, sequence_id: str) -> None:
        del self.queued[sequence_id]

    def finished(self, sequence: SequenceState, length: int) -> None:
        self.lengths.append(length)
        line = self.announced.pop(sequence.sequence_id, None)
        if line is not None and line.prefix_path:
            self.kept[line.prefix_path] -= 1

    # Its optional abilities.

    def announce(self, lines: Iterable[LineMetadata]) -> None:
        self.announced.update({line.line_id: line for line in lines})
        self.kept.update(line.prefix_path for line in self.announced.values() if line.prefix_path)

    def assign(self, queued: Iterable[SequenceState], num_ranks: int) -> dict[str, int]:
        by_length = sorted(queued, key=self._length, reverse=True)
        return {one.sequence_id: position * num_ranks // len(by_length) for position, one in enumerate(by_length)}

    def keeps(self, prefix: Prefix) -> bool:
        return self.kept[prefix] > 0

    def release(self, pages: int) -> Iterator[Prefix]:
        for prefix in [prefix for prefix, lines in self.kept.items() if lines > 0]:
            if pages <= 0:
                return
            self.kept[prefix] = 0
            pages -= len(prefix)
            yield prefix


def taken(order: OrderPolicy) -> list[int]:
    return [one.arrival for one, _ in order.take(BUDGETS)]


@pytest.mark.parametrize("name", config.ORDERS)
def test_every_policy_of_the_command_line_yields_each_queued_sequence_once(name):
    rng, order, alive = random.Random(3), make_order(name), set()
    for arrival in range(300):
        order.offer([sequence(arrival, prompt=rng.randint(1, 99))])
        alive.add(arrival)
        if rng.random() < 0.5:
            gone = rng.choice(sorted(alive))
            alive.remove(gone)
            order.drop(f"s{gone}")
    found = taken(order)
    assert len(found) == len(set(found))
    assert set(found) == alive


def test_fifo_is_the_order_of_arrival():
    order = make_order("fifo")
    order.offer([sequence(i, prompt=50 - i) for i in range(5)])
    order.drop("s2")
    assert taken(order) == [0, 1, 3, 4]


def test_longest_first_is_by_prompt_and_most_output_and_then_by_arrival():
    order = LongestFirst()
    order.offer([sequence(0, prompt=5, new=5), sequence(1, prompt=1, new=20), sequence(2, prompt=6, new=4)])
    assert taken(order) == [1, 0, 2]


def test_a_short_sequence_is_overtaken_by_a_bounded_number_of_later_ones():
    order = LongestFirst(most_later=10)
    order.offer([sequence(0, prompt=1)])
    order.offer([sequence(i, prompt=90) for i in range(1, 11)])
    assert taken(order)[-1] == 0
    order.offer([sequence(11, prompt=90)])
    assert taken(order)[0] == 0
    order.drop("s0")
    assert taken(order)[0] == 1, "the next one is overdue only later"


@pytest.mark.parametrize("order", [LongestFirst, TwoEnded])
def test_a_whole_schedule_in_another_order_finishes_every_sequence(order):
    todo = [Request(at=i // 4, prompt=1 + (7 * i) % 50, max_new=20, output=1 + i % 20) for i in range(120)]
    policy = order()
    schedule = VirtualSchedule(todo, plan(b_moe_prefill=64), pages=60, request_slots=16, order=policy)
    log = schedule.run(most_decisions=5000)
    assert sorted(log.finished) == list(range(120))
    assert log.prefilled != sorted(log.prefilled), "the policy was asked"
    assert taken(policy) == []


def test_a_policy_learns_the_length_of_each_finished_sequence():
    policy = TwoEnded()
    todo = [Request(at=0, prompt=5 + i, max_new=9, output=1 + i) for i in range(6)]
    VirtualSchedule(todo, plan(), pages=60, request_slots=16, order=policy).run(most_decisions=500)
    assert sorted(policy.lengths) == [1, 2, 3, 4, 5, 6]


SYSTEM, OTHER = (b"system", b"prompt"), (b"other",)


def lines() -> Iterator[LineMetadata]:
    """Six lines of which the shortest prompt has the longest answer."""
    for number, predicted in enumerate([90, 1, 1, 1, 1, 1]):
        prefix = SYSTEM if number % 2 else OTHER
        yield LineMetadata(line_id=f"s{number}", predicted_tokens=predicted, prefix_path=prefix)


def offered(policy: OrderPolicy) -> OrderPolicy:
    announce(policy, lines())
    policy.offer([sequence(i, prompt=10 + i) for i in range(6)])
    return policy


def test_announced_lengths_order_lines_when_they_are_offered():
    assert taken(offered(TwoEnded())) == [0, 1, 5, 2, 4, 3]


def test_a_policy_assigns_ranks_to_queued_sequences():
    policy = offered(TwoEnded())
    queued = [one for one, _ in policy.take(BUDGETS)]
    assert assign(policy, queued, 2) == {"s0": 0, "s5": 0, "s4": 0, "s3": 1, "s2": 1, "s1": 1}
    policy.assign = lambda queued, num_ranks: {"s0": num_ranks}
    with pytest.raises(AssertionError, match="there are 2 ranks"):
        assign(policy, queued, 2)


def test_a_policy_keeps_a_prefix_until_its_last_line_has_ended_or_pages_are_wanted():
    policy = offered(TwoEnded())
    assert (keeps(policy, SYSTEM), keeps(policy, OTHER), keeps(policy, (b"unknown",))) == (True, True, False)
    for number in (1, 3, 5):
        assert keeps(policy, SYSTEM)
        policy.finished(sequence(number), 1)
    assert not keeps(policy, SYSTEM)
    assert release(policy, 1) == [OTHER]
    assert not keeps(policy, OTHER)
    assert release(policy, 1) == []


@pytest.mark.parametrize("name", config.ORDERS)
def test_a_policy_without_abilities_ignores_announcements_assigns_no_rank_and_keeps_no_prefix(name):
    policy, alone = make_order(name), make_order(name)
    alone.offer([sequence(i, prompt=10 + i) for i in range(6)])
    assert taken(offered(policy)) == taken(alone)
    assert assign(policy, [one for one, _ in policy.take(BUDGETS)], 2) == {}
    assert not keeps(policy, SYSTEM)
    assert release(policy, 5) == []
