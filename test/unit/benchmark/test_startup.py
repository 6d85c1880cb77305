"""The start-up benchmark reads the progress of a program from its output."""

from __future__ import annotations

import sys

import pytest
from startup import FIRST_TOKEN, PROGRAMS, READY, Start, command_of, mark_of, measure, table

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


def test_the_table_has_a_line_for_each_program():
    starts = [Start(marks_s={READY: 1.0 * n, FIRST_TOKEN: 2.0 * n}, end_s=3.0 * n, cpu_s=4.0) for n in (1, 2, 3)]
    line = "| command | 2.0 (1.0-3.0) | 4.0 (2.0-6.0) | 6.0 (3.0-9.0) | 4.0 (4.0-4.0) |"
    assert table({"command": starts}).splitlines()[-1] == line
