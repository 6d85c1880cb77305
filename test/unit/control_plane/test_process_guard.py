"""What is guarded ends with its guardian, however that ends."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from sgl_batch.control_plane.instances.process_guard import ProcessGuard

WITHIN_S = 20
# It guards a process that it has not started, and then waits.
PROGRAM = """
import sys
from sgl_batch.control_plane.instances.process_guard import ProcessGuard
guard = ProcessGuard([int(sys.argv[1])])
print(guard.pid, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    """Start a process that does nothing."""
    process = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"])
    yield process
    process.kill()
    process.wait()


def test_a_guarded_process_is_killed_when_its_guardian_is_killed(sleeper: subprocess.Popen[bytes]) -> None:
    argv = [sys.executable, "-c", PROGRAM, str(sleeper.pid)]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as guardian:
        assert guardian.stdout is not None
        guard = psutil.Process(int(guardian.stdout.readline()))
        assert sleeper.poll() is None
        guardian.kill()
    assert sleeper.wait(WITHIN_S) == -signal.SIGKILL
    _, left = psutil.wait_procs([guard], WITHIN_S)
    assert not left, "the guard ends too"


def test_a_guard_that_is_closed_kills_at_once_and_a_second_time_nothing(sleeper: subprocess.Popen[bytes]) -> None:
    guard = ProcessGuard([sleeper.pid])
    guard.close()
    assert sleeper.wait(WITHIN_S) == -signal.SIGKILL
    guard.close()


def test_a_process_that_has_ended_is_left_out(sleeper: subprocess.Popen[bytes]) -> None:
    ended = subprocess.Popen([sys.executable, "-S", "-c", ""])
    ended.wait()
    assert not Path(f"/proc/{ended.pid}").exists()
    guard = ProcessGuard([ended.pid, sleeper.pid])
    guard.close()
    assert sleeper.wait(WITHIN_S) == -signal.SIGKILL
