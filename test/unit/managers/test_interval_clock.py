"""The time of an interval of steps, which may overlap."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import SimpleNamespace

import pytest

from sgl_batch.managers import interval_clock
from sgl_batch.managers.interval_clock import IntervalClock


@pytest.fixture
def at(monkeypatch: pytest.MonkeyPatch) -> Callable[[Iterable[float]], None]:
    """Set the times that the clock will return."""

    def set_times(times: Iterable[float]) -> None:
        clock = iter(times)
        monkeypatch.setattr(interval_clock, "time", SimpleNamespace(perf_counter=lambda: next(clock)))

    return set_times


def test_time_between_two_steps_is_not_counted(at: Callable[[Iterable[float]], None]) -> None:
    at([10.0, 11.0, 15.0, 17.0])
    clock = IntervalClock()
    for rows in (4, 3):
        clock.begin_step(rows)
        clock.end_step()
    assert (clock.interval.rows, clock.interval.seconds) == (7, 3.0)


def test_time_of_two_steps_at_once_is_counted_once(at: Callable[[Iterable[float]], None]) -> None:
    at([10.0, 12.0, 13.0, 21.0])
    clock = IntervalClock()
    clock.begin_step(4)
    clock.begin_step(4)
    clock.end_step()
    clock.begin_step(4)
    clock.end_step()
    clock.end_step()
    assert clock.interval.seconds == 11.0


def test_a_boundary_counts_towards_the_interval_that_it_begins(at: Callable[[Iterable[float]], None]) -> None:
    at([10.0, 11.0, 14.0, 20.0, 22.0])
    clock = IntervalClock()
    clock.begin_step(4)
    clock.end_step()
    clock.begin(9, boundary_began=12.0)
    clock.begin_step(5)
    clock.end_step()
    interval = clock.interval
    assert (interval.number, interval.alive, interval.rows, interval.seconds) == (1, 9, 5, 4.0)
