"""An engine hangs when it has work and makes no progress; an idle or working engine does not."""

from __future__ import annotations

from sgl_batch.api.progress_watch import ProgressWatch


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_an_engine_with_work_and_without_progress_is_stalled_after_the_limit():
    clock = Clock()
    watch = ProgressWatch(10.0, clock)
    watch.see({"steps": 1}, has_work=True)
    clock.now_s = 9.9
    watch.see({"steps": 1}, has_work=True)
    assert not watch.is_stalled
    clock.now_s = 10.0
    watch.see({"steps": 1}, has_work=True)
    assert watch.is_stalled


def test_an_engine_that_does_not_answer_is_stalled_too():
    clock = Clock()
    watch = ProgressWatch(10.0, clock)
    watch.see({"steps": 1}, has_work=True)
    clock.now_s = 11.0
    watch.see(None, has_work=True)
    assert watch.is_stalled
    assert watch.still_s == 11.0


def test_any_count_that_moves_is_progress():
    clock = Clock()
    watch = ProgressWatch(10.0, clock)
    for step in range(5):
        clock.now_s = 9.0 * step
        watch.see({"steps": step}, has_work=True)
        assert not watch.is_stalled


def test_an_idle_engine_is_not_stalled():
    clock = Clock()
    watch = ProgressWatch(10.0, clock)
    watch.see({"steps": 1}, has_work=False)
    clock.now_s = 1000.0
    watch.see({"steps": 1}, has_work=False)
    clock.now_s = 1009.0
    watch.see({"steps": 1}, has_work=True)
    assert not watch.is_stalled


def test_without_a_limit_nothing_is_stalled():
    clock = Clock()
    watch = ProgressWatch(0.0, clock)
    clock.now_s = 1e9
    watch.see(None, has_work=True)
    assert not watch.is_stalled
