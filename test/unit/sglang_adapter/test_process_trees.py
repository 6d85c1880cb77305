"""An engine's processes end with all that they have started, even if some of them have ended by themselves."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator

import psutil
import pytest

from sgl_batch.sglang_adapter.process_trees import end_trees, processes_of

# Starts a child that starts one, and says so.
PARENT = """
import subprocess, sys, time
depth = int(sys.argv[1])
if depth:
    subprocess.Popen([sys.executable, "-c", sys.argv[2], str(depth - 1), sys.argv[2]])
else:
    print("all run", flush=True)
time.sleep(600)
"""


@pytest.fixture
def parent() -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", PARENT, "2", PARENT]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as started:
        assert started.stdout is not None
        assert started.stdout.readline() == "all run\n"
        yield started
        started.kill()


def tree_of(parent: subprocess.Popen[str]) -> list[psutil.Process]:
    root = psutil.Process(parent.pid)
    return [root, *root.children(recursive=True)]


def runs(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


def test_a_process_ends_with_its_descendants_and_a_zombie_is_not_waited_for(parent):
    tree = tree_of(parent)
    assert [runs(process) for process in tree] == [True] * 3
    end_trees(processes_of([parent.pid]), within_s=30)
    assert [runs(process) for process in tree] == [False] * 3
    end_trees(tree, within_s=0)


def test_a_process_that_has_ended_is_no_error_and_the_others_end(parent):
    ended = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    known = processes_of([ended.pid, parent.pid])
    ended.communicate()
    assert processes_of([ended.pid]) == []
    end_trees(known)
    assert parent.wait(10) < 0


def test_processes_may_end_while_they_are_listed(parent):
    """As ranks do when another thread ends the process that started them."""
    tree = tree_of(parent)
    threads = [threading.Thread(target=end_trees, args=(tree[n:],)) for n in (0, 1, 2, 0)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not any(map(runs, tree[1:]))
    assert parent.wait(10) < 0


def test_a_process_that_does_not_end_is_reported_with_its_pid(parent, monkeypatch):
    monkeypatch.setattr(psutil.Process, "kill", lambda self: None)
    with pytest.raises(RuntimeError, match=rf"processes \[.*{parent.pid}\] still run 0.1 s after they were killed"):
        end_trees(processes_of([parent.pid]), within_s=0.1)
