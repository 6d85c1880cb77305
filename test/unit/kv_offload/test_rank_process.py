"""A process runs while any of its threads may still write; its number may be reused later."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from sgl_batch.kv_offload.rank_process import is_running, process_start


@pytest.fixture
def process():
    process = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
    yield process
    process.kill()
    process.wait()


def test_a_killed_process_no_longer_runs_before_its_parent_waits_for_it(process):
    start = process_start(process.pid)
    assert is_running(process.pid, start)
    os.kill(process.pid, signal.SIGKILL)
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert not is_running(process.pid, start)
    process.wait()
    assert not is_running(process.pid, start)
    with pytest.raises(ProcessLookupError, match=rf"no process {process.pid}"):
        process_start(process.pid)


def test_a_stopped_process_still_runs(process):
    os.kill(process.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
    assert is_running(process.pid, process_start(process.pid))


def test_a_later_process_with_the_same_number_is_a_different_process(process):
    assert not is_running(process.pid, process_start(process.pid) - 1)


def test_a_process_runs_while_any_thread_runs():
    # The first thread ends; the other runs until its input ends.
    code = (
        "import ctypes, sys, threading\n"
        "threading.Thread(target=sys.stdin.read).start()\n"
        "ctypes.CDLL(None).pthread_exit(None)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE) as process:
        start = process_start(process.pid)
        while Path(f"/proc/{process.pid}/stat").read_text(encoding="ascii").split()[2] != "Z":
            os.sched_yield()
        assert is_running(process.pid, start)
        process.kill()
