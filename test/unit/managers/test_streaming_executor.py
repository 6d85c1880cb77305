"""The time of a page of steps, of which one may begin before the one before it ends."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import SimpleNamespace

import pytest

from sgl_batch.managers import streaming_executor
from sgl_batch.managers.streaming_executor import _Page


@pytest.fixture
def at(monkeypatch: pytest.MonkeyPatch) -> Callable[[Iterable[float]], None]:
    """Sets what a clock will say."""

    def set_times(times: Iterable[float]) -> None:
        clock = iter(times)
        monkeypatch.setattr(streaming_executor, "time", SimpleNamespace(perf_counter=lambda: next(clock)))

    return set_times


def test_what_lies_between_two_steps_is_not_counted(at: Callable[[Iterable[float]], None]) -> None:
    at([10.0, 11.0, 15.0, 17.0])
    page = _Page()
    for rows in (4, 3):
        page.begin_step(rows)
        page.end_step()
    assert (page.rows, page.seconds) == (7, 3.0)


def test_time_of_two_steps_at_once_is_counted_once(at: Callable[[Iterable[float]], None]) -> None:
    at([10.0, 12.0, 13.0, 21.0])
    page = _Page()
    page.begin_step(4)
    page.begin_step(4)
    page.end_step()
    page.begin_step(4)
    page.end_step()
    page.end_step()
    assert page.seconds == 11.0
