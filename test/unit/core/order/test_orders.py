"""Each order policy yields every queued sequence once, in its order, and forgets those that are dropped."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from sgl_batch import config
from sgl_batch.core.order import make_order
from sgl_batch.core.order.interface import Budgets, OrderPolicy, Side
from sgl_batch.core.order.longest_first import LongestFirst
from sgl_batch.core.sequence import Sequence

sys.path.insert(0, str(Path(__file__).parent.parent))
from sequence_builders import plan, sequence
from virtual_schedule import Request, VirtualSchedule

BUDGETS = Budgets(tokens=100, pages=100)


class TwoEnded:
    """A toy: the longest and the shortest prompt in turn, as a scan from both ends of a sorted list takes them."""

    def __init__(self) -> None:
        self.queued: dict[str, Sequence] = {}
        self.lengths: list[int] = []

    def offer(self, sequences: Iterable[Sequence]) -> None:
        self.queued.update({one.sequence_id: one for one in sequences})

    def take(self, budgets: Budgets) -> Iterator[tuple[Sequence, Side]]:
        left = sorted(self.queued.values(), key=lambda one: (one.prompt_tokens, one.arrival))
        while left:
            yield left.pop(), Side.TAIL
            if left:
                yield left.pop(0), Side.HEAD

    def drop(self, sequence_id: str) -> None:
        del self.queued[sequence_id]

    def finished(self, sequence: Sequence, length: int) -> None:
        self.lengths.append(length)


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
    schedule = VirtualSchedule(todo, plan(b_moe_prefill=64), pages=60, slots=16, order=policy)
    log = schedule.run(most_decisions=5000)
    assert sorted(log.finished) == list(range(120))
    assert log.prefilled != sorted(log.prefilled), "the policy was asked"
    assert taken(policy) == []


def test_a_two_ended_policy_hears_the_length_of_what_has_ended():
    policy = TwoEnded()
    todo = [Request(at=0, prompt=5 + i, max_new=9, output=1 + i) for i in range(6)]
    VirtualSchedule(todo, plan(), pages=60, slots=16, order=policy).run(most_decisions=500)
    assert sorted(policy.lengths) == [1, 2, 3, 4, 5, 6]
