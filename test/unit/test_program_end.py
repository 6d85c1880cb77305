"""A program ends with its exit code at once, and after Ctrl-C with one line."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    ("body", "code", "said"),
    [
        ("return 2", 2, ""),
        ("raise SystemExit(3)", 3, ""),
        ("raise KeyboardInterrupt", 130, "sgl-batch: interrupted\n"),
        ("os.kill(os.getpid(), signal.SIGINT); time.sleep(60)", 130, "sgl-batch: interrupted\n"),
    ],
)
def test_a_program_ends_with_its_exit_code(body: str, code: int, said: str) -> None:
    program = f"""
import os, signal, sys, time
from sgl_batch.program_end import end_with
sys.argv[0] = "/somewhere/sgl-batch"
def program():
    {body}
end_with(program)
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (ran.returncode, ran.stdout, ran.stderr) == (code, "", said)
