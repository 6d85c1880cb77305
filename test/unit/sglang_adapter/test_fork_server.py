"""Processes from the fork server: what they share with it and with the program, and that none outlives the program."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

# The modules below stand for an engine run, and for what it imports.
OWNER = """
import multiprocessing, os, sys, time
import psutil
from sgl_batch.sglang_adapter import fork_server
from sgl_batch.sglang_adapter.child_processes import FORKSERVER, start_method_of

class Owner:
    start_method = FORKSERVER
    def __init__(self):
        self.caller_environment = fork_server.CallerEnvironment()
    def tell(self, pipe):
        inherited = os.environ.get("RUN_BEFORE"), os.environ.get("COLUMNS")
        served = fork_server.init_forked_process()
        self.caller_environment.take()
        print("from the child", flush=True)
        parent = psutil.Process().parent()
        pipe.send((served, os.getppid(), parent.pid, inherited, os.environ.get("COLUMNS"), IMPORTED_IN))
    def start_another_and_wait(self, pipe):
        fork_server.init_forked_process()
        other = start(self.wait, pipe)
        pipe.send((os.getpid(), other.pid))
        time.sleep(600)
    def wait(self, pipe):
        fork_server.init_forked_process()
        time.sleep(600)

IMPORTED_IN = os.getpid()
owner = Owner()

def start(body, pipe):
    multiprocessing.set_start_method("spawn", force=True)
    with start_method_of(body):
        process = multiprocessing.get_context().Process(target=body, args=(pipe,))
        process.start()
    assert multiprocessing.get_start_method() == "spawn", "the start method is not restored"
    return process

def answer(body):
    ours, theirs = multiprocessing.Pipe()
    start(body, theirs)
    return ours.recv()
"""


@pytest.fixture
def program(tmp_path: Path):
    """Start a program that imports OWNER as `owning`, with this text."""
    (tmp_path / "owning.py").write_text(OWNER)
    started = []

    def begin(text: str) -> subprocess.Popen[str]:
        whole = f"from owning import *\nimport os\nif __name__ == '__main__':\n{text}"
        (tmp_path / "program.py").write_text(whole)
        environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
        argv = [sys.executable, str(tmp_path / "program.py")]
        process = subprocess.Popen(
            argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, cwd=tmp_path
        )
        started.append(process)
        return process

    yield begin
    for process in started:
        process.kill()
        process.communicate()


def printed_by(process: subprocess.Popen[str]) -> list[str]:
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    return out.splitlines()


def test_two_processes_come_from_one_server_that_has_imported_for_them(program):
    text = """
    one, other = answer(owner.tell), answer(owner.tell)
    assert one[0] and other[0], "they do not come from the server"
    assert one[1] == other[1] != os.getpid(), "they come from two servers"
    assert one[2] == other[2] == os.getpid(), "psutil calls the server their parent"
    assert one[5] == other[5] == one[1], "they import anew"
    assert len(os.listdir(f"/proc/{one[1]}/task")) == 1, "the server has threads"
"""
    assert printed_by(program(text)) == ["from the child"] * 2


def test_a_server_that_begins_early_serves_an_engine_of_default_arguments(program):
    text = """
    from sgl_batch.sglang_adapter.child_processes import _SET_BY_SGLANG, begin_fork_server, environment, platform
    begin_fork_server("some platform", ("owning",))
    early = {child.pid for child in psutil.Process().children()}
    with platform("some platform"), environment(_SET_BY_SGLANG):
        os.environ["NCCL_CUMEM_ENABLE"] = "0"
        assert answer(owner.tell)[1] in early
"""
    assert printed_by(program(text)) == ["from the child"]


def test_in_another_environment_another_server_imports_anew_and_the_first_ends_with_its_processes(program):
    text = """
    served, first, parent, inherited, *_ = answer(owner.tell)
    assert served and inherited == (None, os.environ.get("COLUMNS"))
    os.environ["RUN_BEFORE"] = "yes"
    served, second, parent, inherited, *_ = answer(owner.tell)
    assert served and inherited[0] == "yes" and parent == os.getpid()
    assert first != second == answer(owner.tell)[1]
    while psutil.pid_exists(first):
        time.sleep(0.01)
"""
    assert printed_by(program(text)) == ["from the child"] * 3


def test_a_program_that_keeps_servers_returns_to_that_of_an_earlier_environment(program):
    text = """
    with fork_server.keeping_servers():
        first = answer(owner.tell)[1]
        os.environ["RUN_BEFORE"] = "yes"
        second = answer(owner.tell)[1]
        del os.environ["RUN_BEFORE"]
        assert first == answer(owner.tell)[1] != second
    while psutil.pid_exists(first):
        time.sleep(0.01)
    os.environ["RUN_BEFORE"] = "yes"
    assert answer(owner.tell)[1] == second, "the newest is not kept"
"""
    assert printed_by(program(text)) == ["from the child"] * 4


def test_a_forked_process_has_the_callers_streams_and_variables(program, tmp_path):
    text = """
    answer(owner.tell)
    os.dup2(os.open("elsewhere.txt", os.O_WRONLY | os.O_CREAT), 1)
    os.environ["COLUMNS"] = "77"
    assert answer(owner.tell)[4] == "77"
"""
    assert printed_by(program(text)) == ["from the child"]
    assert (tmp_path / "elsewhere.txt").read_text() == "from the child\n"


@pytest.mark.parametrize("killed", ["program", "process between"])
def test_a_forked_process_ends_with_its_requesting_process(program, killed):
    text = """
    print(*answer(owner.start_another_and_wait), flush=True)
    time.sleep(600)
"""
    process = program(text)
    assert process.stdout is not None
    between, last = (psutil.Process(int(pid)) for pid in process.stdout.readline().split())
    server = between.parent()
    assert server is not None
    assert server.pid != process.pid
    assert last.parent() == server, "a process of a process comes from another server"
    os.kill(process.pid if killed == "program" else between.pid, signal.SIGKILL)
    await_end(between, last, *([server] if killed == "program" else []))


def runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:  # ended between the two looks
        return False


def await_end(*processes: psutil.Process) -> None:
    deadline = time.monotonic() + 30
    while any(runs(process) for process in processes):
        assert time.monotonic() < deadline, f"{processes} still run"
        time.sleep(0.01)


def test_a_process_forked_from_the_program_starts_a_server_of_its_own(program):
    text = """
    fork_server.begin(["owning"])
    child = os.fork()
    if child == 0:
        print("own" if answer(owner.tell)[1] != os.getppid() else "none", flush=True)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
"""
    assert printed_by(program(text)) == ["from the child", "own"]


def test_processes_on_fewer_cores_do_not_come_from_a_server_of_more(program):
    text = """
    cores = os.sched_getaffinity(0)
    if len(cores) > 1:
        one = answer(owner.tell)
        os.sched_setaffinity(0, {min(cores)})
        other = answer(owner.tell)
        assert one[1] != other[1], "they come from one server"
        assert os.sched_getaffinity(other[1]) == {min(cores)}
"""
    printed_by(program(text))
