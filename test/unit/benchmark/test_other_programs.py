"""Processor time while an engine is timed: that of its own session, and the machine's busy time less that."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from runners import other_programs
from runners.other_programs import OtherPrograms

TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds that the counting sees, in a list of one."""
    now = [0.0]
    monkeypatch.setattr(other_programs.time, "perf_counter", lambda: now[0])
    return now


def write(proc: Path, *, user_s: float, idle_s: float, own_s: float, foreign_s: float) -> None:
    """Write a /proc: user and idle time of all cores, and the time of one process in this session and one outside."""
    user, idle, own, foreign = (round(TICKS_PER_S * seconds) for seconds in (user_s, idle_s, own_s, foreign_s))
    proc.mkdir(exist_ok=True)
    (proc / "stat").write_text(f"cpu  {user} 0 0 {idle} 500 0 0 900 77 0\ncpu0 1 0 0 1\n")
    (proc / "self").mkdir(exist_ok=True)
    for pid, session, ticks in ((11, os.getsid(0), own), (12, os.getsid(0) + 1, foreign)):
        (proc / str(pid)).mkdir(exist_ok=True)
        line = f"{pid} (a (very) odd name) R 1 {session} {session} 0 0 0 0 0 0 0 {ticks} 0 0 0 20 0 1"
        (proc / str(pid) / "stat").write_text(line)


def test_the_busy_time_of_other_sessions_counts_and_that_of_the_own_one_does_not(
    tmp_path: Path, clock: list[float]
) -> None:
    write(tmp_path / "proc", user_s=100, idle_s=50, own_s=30, foreign_s=70)
    others = OtherPrograms(tmp_path / "proc")
    write(tmp_path / "proc", user_s=121, idle_s=60, own_s=46, foreign_s=75)
    clock[0] = 10.0
    assert others.cores() == pytest.approx(0.5)


def test_a_share_is_never_below_nothing(tmp_path: Path, clock: list[float]) -> None:
    write(tmp_path / "proc", user_s=1, idle_s=1, own_s=1, foreign_s=0)
    others = OtherPrograms(tmp_path / "proc")
    write(tmp_path / "proc", user_s=2, idle_s=1, own_s=2.5, foreign_s=0)
    clock[0] = 1.0
    assert others.cores() == 0.0


def test_the_time_of_the_own_session_counts_from_the_making_on(tmp_path: Path, clock: list[float]) -> None:
    write(tmp_path / "proc", user_s=100, idle_s=50, own_s=30, foreign_s=70)
    others = OtherPrograms(tmp_path / "proc")
    write(tmp_path / "proc", user_s=121, idle_s=60, own_s=46, foreign_s=75)
    assert others.own_s() == pytest.approx(16.0)


def test_without_proc_nothing_is_known(tmp_path: Path) -> None:
    others = OtherPrograms(tmp_path / "nowhere")
    assert others.cores() is None
    assert others.own_s() is None


def test_the_machines_own_proc_can_be_read() -> None:
    cores = OtherPrograms().cores()
    assert cores is not None
    assert cores >= 0.0
