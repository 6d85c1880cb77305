"""Threads do each task once, mostly neighbouring ones, and help each other in the end."""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path

HERE = Path(__file__).parent
KERNELS = HERE.parents[2] / "sgl-kernel" / "csrc" / "cpu"


def test_each_task_is_done_once_near_its_neighbours_and_nobody_waits_while_some_are_left(tmp_path):
    program = tmp_path / "task_share_checks"
    compiler = shlex.split(os.environ.get("CXX", "g++"))
    flags = ("-std=c++20", "-O2", "-fopenmp", "-pthread", f"-I{KERNELS}", "-o", str(program))
    subprocess.run([*compiler, *flags, str(HERE / "task_share_checks.cpp")], check=True, timeout=300)
    done = subprocess.run([str(program)], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
