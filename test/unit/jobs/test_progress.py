"""Rates, ETA and idle time from counts and a clock."""

from __future__ import annotations

import pytest

from sgl_batch.jobs.progress import WINDOW_S, ProgressTracker


class Clock:
    def __init__(self):
        self.now_s = 100.0

    def __call__(self):
        return self.now_s


@pytest.fixture
def clock():
    return Clock()


def run_for(tracker, clock, seconds, lines_per_s):
    for _ in range(seconds):
        clock.now_s += 1
        for _ in range(lines_per_s):
            tracker.line_done(failed=False, tokens_in=10, tokens_out=3)
        tracker.snapshot()


def test_nothing_done_means_no_eta(clock):
    snapshot = ProgressTracker(10, clock).snapshot()
    assert snapshot.eta_s is None
    assert (snapshot.done, snapshot.tokens_in_per_s) == (0, 0)


def test_a_steady_run_has_its_rates_and_its_eta(clock):
    tracker = ProgressTracker(1000, clock)
    run_for(tracker, clock, 10, lines_per_s=4)
    snapshot = tracker.snapshot()
    assert snapshot.tokens_in_per_s == pytest.approx(40)
    assert snapshot.tokens_out_per_s == pytest.approx(12)
    assert snapshot.eta_s == pytest.approx(960 / 4)
    assert snapshot.elapsed_s == pytest.approx(10)


def test_rates_follow_the_last_minute_and_forget_a_slow_start(clock):
    tracker = ProgressTracker(10_000, clock)
    run_for(tracker, clock, 300, lines_per_s=1)
    run_for(tracker, clock, int(WINDOW_S) + 1, lines_per_s=10)
    snapshot = tracker.snapshot()
    assert snapshot.tokens_in_per_s == pytest.approx(100)
    assert snapshot.eta_s == pytest.approx((10_000 - snapshot.done) / 10)


def test_a_minute_without_a_line_uses_the_whole_runs_rate(clock):
    tracker = ProgressTracker(100, clock)
    run_for(tracker, clock, 10, lines_per_s=5)
    run_for(tracker, clock, 90, lines_per_s=0)
    snapshot = tracker.snapshot()
    assert snapshot.eta_s == pytest.approx(50 * 100 / 50)
    assert snapshot.idle_s == pytest.approx(90)


def test_failed_lines_count_as_done(clock):
    tracker = ProgressTracker(2, clock)
    tracker.line_done(failed=True)
    tracker.line_done(failed=False)
    snapshot = tracker.snapshot(in_flight=0)
    assert (snapshot.done, snapshot.failed) == (2, 1)


def test_live_token_counts_give_rates_before_a_line_is_done(clock):
    tracker = ProgressTracker(2, clock)
    clock.now_s += 2
    tracker.live_tokens(1000, 60)
    snapshot = tracker.snapshot()
    assert snapshot.tokens_in_per_s == pytest.approx(500)
    assert snapshot.tokens_out_per_s == pytest.approx(30)
    assert snapshot.idle_s == 0
