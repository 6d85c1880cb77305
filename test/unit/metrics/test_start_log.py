"""The log of a start: phases of several processes on one clock, nothing where none was asked for."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from sgl_batch.metrics.start_log import Phase, StartLog, phases, table

OTHER = """
import sys
from pathlib import Path
from sgl_batch.metrics.start_log import StartLog

StartLog(Path(sys.argv[1]), "other").end("all of it")
"""


def test_without_a_directory_nothing_is_written(tmp_path: Path) -> None:
    StartLog().end("imports")
    assert list(tmp_path.iterdir()) == []
    assert phases(tmp_path) == []


def test_a_phase_begins_where_the_one_before_it_ended(tmp_path: Path) -> None:
    log = StartLog(tmp_path, "scheduler")
    log.end("imports")
    log.end("weights read", num_bytes=5)
    first, second = phases(tmp_path)
    assert (first.process, first.name, first.num_bytes) == ("scheduler", "imports", 0)
    assert (second.name, second.num_bytes) == ("weights read", 5)
    assert first.began_s < first.ended_s == second.began_s <= second.ended_s


def test_the_first_phase_of_a_program_begins_with_the_engine_and_that_of_a_process_with_itself(tmp_path: Path) -> None:
    for name, from_process in (("process", True), ("program", False)):
        log = StartLog(tmp_path, name, from_process=from_process)
        log.end("imports")
    began = {phase.process: phase.began_s for phase in phases(tmp_path)}
    assert began["process"] < began["program"]


def test_processes_share_one_clock(tmp_path: Path) -> None:
    log = StartLog(tmp_path, "own", from_process=False)
    subprocess.run([sys.executable, "-c", OTHER, str(tmp_path)], check=True, env=dict(os.environ))
    log.end("waited for the other")
    other, own = phases(tmp_path)
    assert (other.process, own.process) == ("other", "own")
    assert own.began_s - 0.02 <= other.began_s < other.ended_s < own.ended_s


def test_the_table_counts_from_the_first_begin_and_tells_the_rate_of_what_was_read() -> None:
    found = [
        Phase(process="scheduler", name="imports", began_s=100.0, ended_s=102.5, num_bytes=0),
        Phase(process="detokenizer", name="imports", began_s=101.0, ended_s=103.0, num_bytes=0),
        Phase(process="scheduler", name="weights read", began_s=102.5, ended_s=104.5, num_bytes=3_000_000_000),
    ]
    heading, *lines = table(found).splitlines()
    assert heading.split() == ["ends", "at", "took", "process", "phase"]
    assert [line.split()[:5] for line in lines] == [
        ["2.50", "s", "2.50", "s", "scheduler"],
        ["3.00", "s", "2.00", "s", "detokenizer"],
        ["4.50", "s", "2.00", "s", "scheduler"],
    ]
    assert lines[2].endswith("weights read, 3.00 GB at 1.50 GB/s")
    assert "GB" not in lines[0]


def test_a_start_of_which_nothing_ended_says_so() -> None:
    assert table([]) == "no process has ended a phase"
