"""Scratch memory stays while large calls come again and again, and is given back after the last one."""

from __future__ import annotations

from compiled_checks import KERNELS, compiled, run


def test_what_large_calls_took_stays_between_them_and_goes_after_them(tmp_path):
    done = run(compiled(tmp_path, "workspace_checks", KERNELS / "reserved_memory.cpp"))
    assert done.returncode == 0, done.stdout + done.stderr
