"""Children start with the environment that suits a CPU, and are forked only where that is safe and asked for."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from sgl_batch.sglang_adapter import child_processes
from sgl_batch.sglang_adapter.names import CPU_PLATFORM

BOUNDS = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
KEYS = ("SGLANG_PLATFORM", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "PYTHONWARNINGS", *BOUNDS)


@pytest.fixture(autouse=True)
def bare_environment(monkeypatch):
    for key in KEYS:
        monkeypatch.delenv(key, raising=False)


def environment() -> dict[str, str | None]:
    return {key: os.environ.get(key) for key in KEYS}


def test_children_on_a_cpu_get_the_platform_waiting_threads_and_bounded_kernel_caches():
    with child_processes.platform(CPU_PLATFORM):
        inside = environment()
    assert inside["SGLANG_PLATFORM"] == CPU_PLATFORM
    assert (inside["OMP_WAIT_POLICY"], inside["GOMP_SPINCOUNT"]) == ("PASSIVE", "3000")
    assert inside["PYTHONWARNINGS"] == "ignore:resource_tracker:UserWarning"
    assert all(int(inside[key] or 0) in range(1, 1024) for key in BOUNDS)


@pytest.mark.parametrize("key", KEYS[1:])
def test_variables_of_the_environment_are_kept(monkeypatch, key):
    monkeypatch.setenv(key, "7")
    with child_processes.platform(CPU_PLATFORM):
        assert os.environ[key] == "7"
    assert os.environ[key] == "7"


def test_the_parents_environment_is_restored_even_after_an_error():
    before = environment()
    with pytest.raises(KeyError), child_processes.platform(CPU_PLATFORM):
        raise KeyError
    assert environment() == before


def test_without_a_platform_nothing_changes():
    with child_processes.platform(None):
        assert environment() == dict.fromkeys(KEYS)


PREAMBLE = """
import multiprocessing, os, sys, threading
from sgl_batch.sglang_adapter.child_processes import FORK, SPAWN, start_method_of, template

class Owner:
    def __init__(self, start_method):
        self.start_method = start_method
    def body(self):
        pass

def method_inside(owner):
    multiprocessing.set_start_method(SPAWN, force=True)
    with start_method_of(owner.body):
        inside = multiprocessing.get_start_method()
    assert multiprocessing.get_start_method() == SPAWN, "the start method is not restored"
    return inside
"""


def run_program(text: str) -> str:
    """A program of its own: this process has threads, and torch imported."""
    done = subprocess.run([sys.executable, "-c", PREAMBLE + text], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_a_function_whose_owner_asks_for_a_fork_is_forked():
    program = "print(*(method_inside(Owner(start_method)) for start_method in (FORK, SPAWN, None)))"
    assert run_program(program) == "fork spawn spawn"


def test_a_process_with_threads_is_not_forked():
    program = """
over = threading.Event()
thread = threading.Thread(target=over.wait)
thread.start()
print(method_inside(Owner(FORK)))
over.set()
"""
    assert run_program(program) == "spawn"


TEMPLATE = """
before = os.environ.get("SGLANG_PLATFORM"), os.environ.get("OPENBLAS_NUM_THREADS")
with template("cpu") as can_fork:
    import sgl_batch.engine.engine
    from sglang.srt.platforms import current_platform
    print(can_fork, os.environ["SGLANG_PLATFORM"], type(current_platform).__name__)
    print("torch._inductor.compile_fx" in sys.modules)
after = os.environ.get("SGLANG_PLATFORM"), os.environ.get("OPENBLAS_NUM_THREADS")
assert after == before, "the environment is not restored"
print(method_inside(Owner(FORK)))
sys.stdout.flush()
os._exit(0)  # a template's objects are frozen, and libraries tell of them when the interpreter is taken apart
"""


def test_a_template_has_sglang_for_a_cpu_without_a_compiler_or_threads():
    assert run_program(TEMPLATE).splitlines() == [f"True {CPU_PLATFORM} BatchCpuPlatform", "False", "fork"]


def test_there_is_no_template_if_torch_is_imported_already():
    program = "import torch\nwith template('cpu') as can_fork:\n    print(can_fork, os.environ.get('SGLANG_PLATFORM'))"
    assert run_program(program) == "False None"
