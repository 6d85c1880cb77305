"""The display of a run's progress."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest

from sgl_batch.jobs.progress import Snapshot
from sgl_batch.jobs.progress_display import (
    BarDisplay,
    NoDisplay,
    PlainDisplay,
    choose_display,
    details,
    duration,
)

START = Snapshot(
    total=2000,
    done=0,
    failed=0,
    in_flight=64,
    elapsed_s=0,
    tokens_in=0,
    tokens_out=0,
    tokens_in_per_s=0,
    tokens_out_per_s=0,
    eta_s=None,
    idle_s=0,
)
MIDDLE = replace(START, done=500, failed=3, elapsed_s=754, tokens_in_per_s=1234.4, tokens_out_per_s=56.6, eta_s=3723)


class Terminal(io.StringIO):
    def isatty(self):
        return True


class Gone(io.StringIO):
    def write(self, text):
        raise BrokenPipeError(32, "Broken pipe")


def test_a_plain_line_shows_progress_rate_and_eta():
    stream = io.StringIO()
    PlainDisplay(stream).update(MIDDLE)
    assert stream.getvalue() == (
        "[12:34] 500/2,000 lines (25.0%), 3 failed, in 1,234 tok/s, out 57 tok/s, 64 in flight, ETA 1:02:03\n"
    )


def test_plain_lines_come_first_at_once_then_at_intervals_and_at_the_end():
    stream = io.StringIO()
    display = PlainDisplay(stream)
    for tenth in range(201):
        display.update(replace(START, elapsed_s=tenth / 10))
    display.close(replace(START, elapsed_s=20.1))
    shown = [line[: line.index("]") + 1] for line in stream.getvalue().splitlines()]
    assert shown == ["[0:00]", "[0:05]", "[0:10]", "[0:15]", "[0:20]", "[0:20]"]


def test_plain_lines_of_a_long_run_are_fewer():
    stream = io.StringIO()
    display = PlainDisplay(stream)
    for second in range(3600, 7200):
        display.update(replace(START, elapsed_s=second))
    assert len(stream.getvalue().splitlines()) == 120


def test_a_run_that_stands_still_says_so():
    assert "nothing finished for 2:00" in details(replace(START, idle_s=120))
    assert "nothing finished" not in details(replace(START, idle_s=5))


def test_auto_is_a_bar_on_a_terminal_and_plain_elsewhere():
    assert isinstance(choose_display("auto", Terminal()), BarDisplay)
    assert isinstance(choose_display("auto", io.StringIO()), PlainDisplay)
    assert isinstance(choose_display("plain", Terminal()), PlainDisplay)
    assert type(choose_display("off", Terminal())) is NoDisplay


def test_the_bar_shows_lines_rates_and_eta_and_notes_stand_above_it():
    stream = Terminal()
    display = BarDisplay(stream)
    display.note("before")
    display.update(MIDDLE)
    display.note("stopping")
    display.close(replace(MIDDLE, done=2000, in_flight=0))
    text = stream.getvalue()
    assert "500/2000 lines" in text
    assert "in 1,234 tok/s" in text
    assert "ETA 1:02:03" in text
    assert "2000/2000 lines" in text
    assert "before\n" in text
    assert "stopping\n" in text


def test_off_shows_notes_only():
    stream = io.StringIO()
    display = choose_display("off", stream)
    display.update(MIDDLE)
    display.note("hello")
    display.close(MIDDLE)
    assert stream.getvalue() == "hello\n"


@pytest.mark.parametrize("mode", ["plain", "bar", "off"])
def test_a_closed_stream_does_not_end_a_run(mode):
    stream = Gone()
    display = choose_display(mode, stream)
    display.note("hello")
    display.update(MIDDLE)
    display.note("hello")
    display.close(MIDDLE)
    assert stream.getvalue() == ""


@pytest.mark.parametrize(("seconds", "text"), [(0, "0:00"), (59.6, "1:00"), (3723, "1:02:03"), (183845, "2d 03:04:05")])
def test_durations_read_like_a_clock(seconds, text):
    assert duration(seconds) == text
