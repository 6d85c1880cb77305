"""Owns the rules for reading a process tree's memory by role."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from tree_memory import COMMAND, OTHERS, Memory, Samples, role_of, sample_tree

MIB = 1 << 20


def memory(rss: int, uss: int) -> Memory:
    return Memory(rss_bytes=rss, uss_bytes=uss)


@pytest.mark.parametrize(
    ("title", "is_root", "role"),
    [
        ("sglang::scheduler", False, "scheduler"),
        ("sglang::scheduler_TP0", False, "scheduler"),
        ("sglang::schedul", False, "scheduler"),
        ("sglang::detokenizer", False, "detokenizer"),
        ("sglang::detoken", False, "detokenizer"),
        ("python", False, OTHERS),
        ("sglang::scheduler", True, COMMAND),
    ],
)
def test_a_role_is_read_from_the_title_and_the_root_is_the_command(title: str, is_root: bool, role: str) -> None:
    assert role_of(title, is_root=is_root) == role


def test_a_peak_is_the_most_of_any_sample_for_each_role_and_kind() -> None:
    samples = Samples(taken=[{"a": memory(5, 4), "b": memory(1, 1)}, {"a": memory(3, 9)}])
    assert samples.roles() == ["a", "b"]
    assert samples.peak("a") == memory(5, 9)
    assert samples.peak("b") == memory(1, 1)
    assert samples.peak("c") == memory(0, 0)


def test_late_growth_is_how_far_the_second_half_goes_beyond_the_first() -> None:
    samples = Samples(taken=[{"a": memory(held, 0), "b": memory(9, 0)} for held in (5, 1, 6, 8)])
    assert samples.late_growth_bytes("a") == 3
    assert samples.late_growth_bytes("b") == 0


def test_a_tree_is_its_root_and_the_sums_of_its_children_by_role() -> None:
    program = "import sys; held = b'x' * (64 << 20); print('ready', flush=True); sys.stdin.read()"
    argv = [sys.executable, "-c", program]
    children = [subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) for _ in range(2)]
    try:
        for child in children:
            assert child.stdout is not None
            assert child.stdout.readline() == b"ready\n"
        sample = sample_tree(os.getpid())
    finally:
        for child in children:
            child.communicate()
    assert sample[COMMAND].rss_bytes > MIB
    assert sample[OTHERS].uss_bytes >= 128 * MIB


def test_a_process_that_has_ended_holds_nothing() -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    assert sample_tree(child.pid) == {}
