"""Whose line is next, in a simulated service: windows are met, priorities hold, and no job starves."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field

import pytest

from sgl_batch.jobs.batch_service.fair_share import STARVES_AFTER_S, JobShare, Pace, charge, join, next_turn
from sgl_batch.jobs.batch_service.service_pace import ServicePace

DAY_S = 86_400.0
LONG_S = 1000 * DAY_S  # a window that needs almost no share


@dataclass(kw_only=True)
class Simulation:
    """An engine that answers lines in order at a fixed rate, with at most `depth` in flight."""

    rate: float = 10.0
    depth: int = 40
    now: float = 1000.0
    jobs: dict[int, JobShare] = field(default_factory=dict)
    answered: Counter[int] = field(default_factory=Counter)
    done_at: dict[int, float] = field(default_factory=dict)
    longest_wait_s: Counter[int] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self._engine: deque[int] = deque()
        self._meter = ServicePace(self.now)
        self._last: dict[int, float] = {}

    def add(self, order: int, num_lines: int, *, window_s: float = LONG_S, priority: int = 1) -> None:
        share = JobShare(order=order, weight=priority, deadline=self.now + window_s, num_left=num_lines)
        join(share, self.jobs.values(), self.now)
        self.jobs[order] = share
        self._last[order] = self.now

    def run(self, seconds: float) -> Counter[int]:
        """Lines answered of each job in this time."""
        before, end = Counter(self.answered), self.now + seconds
        while self.now < end:
            self._start_lines()
            if self._engine:
                self._answer(self._engine.popleft())
            self._meter.note_time(self.now + 1 / self.rate, was_busy=bool(self._engine))
            self.now += 1 / self.rate
        return self.answered - before

    def _start_lines(self) -> None:
        while len(self._engine) < self.depth:
            ready = [one for one in self.jobs.values() if one.num_left]
            turn = next_turn(ready, self.now, self._meter.pace(len(self._engine)))
            if turn is None:
                return
            number = min(turn.most_lines, turn.share.num_left, self.depth - len(self._engine))
            turn.share.num_left -= number
            self._engine.extend([turn.share.order] * number)
            charge(turn, number, self.now)

    def _answer(self, order: int) -> None:
        self._meter.line_answered()
        self.answered[order] += 1
        self.longest_wait_s[order] = max(self.longest_wait_s[order], self.now - self._last[order])
        self._last[order] = self.now
        if not self.jobs[order].num_left and order not in self._engine:
            self.done_at[order] = self.now


def shares(found: Counter[int]) -> dict[int, float]:
    return {order: number / found.total() for order, number in found.items()}


def test_without_a_running_job_there_is_no_turn() -> None:
    assert next_turn([], 0.0, Pace()) is None
    assert next_turn([JobShare(order=1, weight=1, deadline=5.0, num_left=9)], 5.0, Pace()) is None


def test_priorities_are_shares_and_equal_jobs_share_equally() -> None:
    service = Simulation(rate=20.0)
    for order, priority in ((1, 1), (2, 3), (3, 1), (4, 20)):
        service.add(order, 100_000, priority=priority)
    found = shares(service.run(600))
    assert found == pytest.approx({1: 1 / 25, 2: 3 / 25, 3: 1 / 25, 4: 20 / 25}, abs=0.01)


def test_a_job_with_a_window_of_a_minute_takes_what_it_needs_and_leaves_the_rest_to_priorities() -> None:
    service = Simulation()
    service.add(1, 100_000, priority=20)
    service.add(2, 100_000, priority=5)
    service.run(60)
    service.add(3, 250, window_s=60)
    found = service.run(60)
    assert service.done_at[3] < service.jobs[3].deadline
    assert found[3] == 250, "its window is met"
    assert found[1] + found[2] == pytest.approx(350, abs=16), "a job of high priority does not wait"
    assert found[1] / found[2] == pytest.approx(4, rel=0.15)


def test_a_priority_that_gives_more_than_the_window_needs_is_not_lowered_by_it() -> None:
    service = Simulation()
    service.add(1, 100_000)
    service.add(2, 100_000)
    service.run(60)
    service.add(3, 100_000, window_s=10 * DAY_S, priority=8)
    assert shares(service.run(300))[3] == pytest.approx(0.8, abs=0.03)


def test_windows_are_met_the_earliest_first_where_all_can_be() -> None:
    service = Simulation(rate=20.0)
    service.add(1, 100_000, priority=100)
    service.run(60)
    for order, num_lines, window_s in ((2, 300, 60), (3, 500, 120), (4, 600, 180)):
        service.add(order, num_lines, window_s=window_s)
    service.run(185)
    assert all(service.done_at[order] < service.jobs[order].deadline for order in (2, 3, 4)), service.done_at


def test_where_not_all_windows_can_be_met_those_of_high_priority_are_and_of_equals_the_earliest() -> None:
    service = Simulation()
    service.add(1, 100_000)
    service.run(60)
    for order, priority in ((2, 1), (3, 2), (4, 1)):
        service.add(order, 250, window_s=60 + order, priority=priority)
    service.run(70)
    met = {order for order in (2, 3, 4) if service.done_at.get(order, 1e9) < service.jobs[order].deadline}
    assert met == {2, 3}


def test_a_window_that_cannot_be_met_takes_nothing_from_the_others() -> None:
    service = Simulation()
    service.add(1, 100_000, priority=20)
    service.run(60)
    service.add(2, 6000, window_s=60)  # ten times what the service answers in a minute
    service.add(3, 150, window_s=60)
    found = service.run(60)
    assert service.done_at[3] < service.jobs[3].deadline, "a window that can be met is met"
    assert found[2] < 0.08 * found.total(), "only the share of its priority"
    assert found[1] > 0.6 * found.total()


def test_windows_never_take_the_whole_service() -> None:
    service = Simulation(rate=20.0)
    service.add(1, 100_000)
    service.run(60)
    service.add(2, 1000, window_s=60)
    found = service.run(50)
    assert shares(found)[1] > 0.08
    assert service.longest_wait_s[1] < 60


def test_no_job_starves_among_many_of_the_highest_priority() -> None:
    service = Simulation(rate=10.0)
    for order in range(30):
        service.add(order, 100_000, priority=100)
    service.add(30, 100_000, priority=1)
    found = service.run(600)
    delay_s = service.depth / service.rate
    assert service.longest_wait_s[30] < STARVES_AFTER_S + delay_s + 1
    assert found[30] < 600 / STARVES_AFTER_S + 2, "and it gets no more than that"
    assert min(found[order] for order in range(30)) > 0.85 * max(found[order] for order in range(30))


def test_jobs_that_starve_take_a_tenth_of_the_service_at_most() -> None:
    service = Simulation(rate=2.0)
    service.add(0, 100_000, priority=100)
    for order in range(1, 101):
        service.add(order, 100_000, priority=1)
    found = service.run(1500)
    assert found[0] > 0.4 * found.total()
    assert max(service.longest_wait_s.values()) < 1.5 * 101 / (0.1 * 2.0)


def test_a_later_job_does_not_catch_up_on_lines_from_before_its_start() -> None:
    service = Simulation(rate=20.0)
    service.add(1, 100_000)
    service.run(600)
    service.add(2, 100_000)
    service.run(5)
    assert shares(service.run(100)) == pytest.approx({1: 0.5, 2: 0.5}, abs=0.02)


def test_the_pace_is_that_of_busy_time_and_is_not_known_before_there_is_any() -> None:
    meter = ServicePace(0.0)
    assert meter.pace(5) == Pace()
    for second in range(1, 41):
        for _ in range(3):
            meter.line_answered()
        meter.note_time(float(second), was_busy=True)
    meter.note_time(5000.0, was_busy=False)
    assert meter.pace(60) == Pace(lines_per_s=3.0, delay_s=20.0)
    for second in range(1, 41):
        meter.line_answered()
        meter.note_time(5000.0 + second, was_busy=True)
    assert meter.pace(0) == Pace(lines_per_s=1.0, delay_s=0.0)
