"""Threads do each task once, mostly neighbouring ones, and help each other in the end."""

from __future__ import annotations

from compiled_checks import compiled, run


def test_each_task_is_done_once_near_its_neighbours_and_nobody_waits_while_some_are_left(tmp_path):
    done = run(compiled(tmp_path, "task_share_checks", flags=("-fopenmp",)))
    assert done.returncode == 0, done.stdout + done.stderr
