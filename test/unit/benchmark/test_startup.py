"""The start-up benchmark reads the progress of a program from its output."""

from __future__ import annotations

import sys
import time

import pytest
from comparison import reading
from comparison.held_memory import AHEAD_BYTES, held_memory
from startup import (
    FIRST_TOKEN,
    PROGRAMS,
    READY,
    Bounds,
    Start,
    command_of,
    load_rate_of,
    load_table,
    mark_of,
    measure,
    table,
)

from sgl_batch.memory.held_memory import PIECE_BYTES

WORKS = """
import sys
print("something else")
print("ready", flush=True)
sum(range(3_000_000))
sys.stderr.write("first token\\n")
"""


@pytest.mark.parametrize(
    ("line", "mark"),
    [
        ("ready\n", READY),
        ("first token\n", FIRST_TOKEN),
        ("[0:00] 0/1 lines (0.0%), in 0 tok/s\n", READY),
        ("[0:01] 1/1 lines (100.0%), in 20 tok/s\n", FIRST_TOKEN),
        ("1 request lines; starting the engine\n", None),
        ("not ready yet\n", None),
    ],
)
def test_a_line_is_a_mark_or_none(line, mark):
    assert mark_of(line) == mark


def test_a_program_is_timed_at_each_mark_and_at_its_end():
    start = measure([sys.executable, "-u", "-c", WORKS])
    assert 0 < start.marks_s[READY] < start.marks_s[FIRST_TOKEN] <= start.end_s


@pytest.mark.parametrize("program", ["raise SystemExit('no model')", "print('ready')"])
def test_a_program_that_fails_or_lacks_a_mark_is_reported_with_its_output(program):
    with pytest.raises(RuntimeError, match=r"ended with \d+ after .*\n(no model|ready)"):
        measure([sys.executable, "-c", program])


@pytest.mark.parametrize("program", PROGRAMS)
def test_every_program_has_a_command_with_the_model(program, tmp_path):
    assert str(tmp_path / "model") in command_of(program, tmp_path / "model", tmp_path, 0)


def test_the_command_gets_the_flags(tmp_path):
    assert command_of("command", tmp_path, tmp_path, 0, ["--page-size", "8"])[-2:] == ["--page-size", "8"]


def test_the_table_has_a_line_for_each_program():
    starts = [
        Start(marks_s={READY: 1.0 * n, FIRST_TOKEN: 2.0 * n}, end_s=3.0 * n, cpu_s=4.0, peak_bytes=n << 30)
        for n in (1, 2, 3)
    ]
    line = "| command | 2.0 (1.0-3.0) | 4.0 (2.0-6.0) | 6.0 (3.0-9.0) | 4.0 (4.0-4.0) | 2.0 (1.0-3.0) |"
    assert table({"command": starts}).splitlines()[-1] == line


@pytest.mark.parametrize(
    ("line", "rate"),
    [
        ("  11.12 s    4.00 s  scheduler    model made, weights read, 2.00 GB at 0.50 GB/s", 0.5e9),
        ("  11.12 s    0.50 s  rank 1       model made, weights read, 2.00 GB at 4.00 GB/s", 4e9),
        ("  11.12 s    3.82 s  scheduler    weights packed", None),
        ("ready", None),
    ],
)
def test_the_load_rate_is_read_from_the_log_of_the_start(line, rate):
    assert load_rate_of(line) == rate


def test_load_rates_are_compared_with_both_ways_to_read_the_same_files():
    starts = {"command": [Start(marks_s={}, end_s=1.0, cpu_s=1.0, peak_bytes=1, load_rate=1.2e9)]}
    lines = load_table(starts, [Bounds(direct=3e9, cached=1.5e9, memory=9e9)]).splitlines()
    assert "| files through the page cache | 1.50 |" in lines
    assert lines[-4:] == [
        "| weights of command | 1.20 |",
        "| of the files past the page cache | 40 % |",
        "| of the files through the page cache | 80 % |",
        "| of the new memory | 13 % |",
    ]


def test_programs_that_report_no_load_have_no_table():
    assert load_table({"stock": [Start(marks_s={}, end_s=1.0, cpu_s=1.0, peak_bytes=1)]}, []) == ""


def test_files_are_read_whole_and_new_memory_is_taken(tmp_path):
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"x" * 10_000)
    assert reading.total_bytes([file]) == 10_000
    assert reading.cached_rate([file]) > 0
    assert reading.memory_rate(4 << 20) > 0


def test_a_program_that_may_not_empty_the_page_cache_says_what_it_needs(monkeypatch, tmp_path):
    monkeypatch.setattr(reading, "_DROP", tmp_path / "missing")
    assert "run as root" in reading.why_not_droppable()


def test_held_memory_is_freed_as_others_take_memory_and_in_the_end():
    with held_memory(3 * PIECE_BYTES, lambda: 64 << 30) as held:
        assert wait_until(lambda: held.num_bytes == 0), "what is freed ahead is more"
    with held_memory(AHEAD_BYTES + 2 * PIECE_BYTES, lambda: 64 << 30) as held:
        assert wait_until(lambda: held.num_bytes <= 2 * PIECE_BYTES)
    assert held.num_bytes == 0


def wait_until(is_so):
    deadline = time.monotonic() + 30
    while not is_so() and time.monotonic() < deadline:
        time.sleep(0.005)
    return is_so()
