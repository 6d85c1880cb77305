"""A service killed at any step resumes: each line has exactly one result line, the same as without a crash."""

from __future__ import annotations

import random
import time

import pytest
from crash_checks import check_counts, check_jobs, start_client, was_killed

from sgl_batch.jobs.failpoints import failpoint_names

# Every transaction passes these two, so that some passes later ones are other transactions.
PASSES = {"database.before_commit": (1, 9), "database.committed": (1, 9)}
CRASHES = [f"{name}:{count}" for name in failpoint_names() for count in PASSES.get(name, (1,))]
NUM_RANDOM_KILLS = 12


def test_without_a_crash_all_is_done_at_once(tmp_path):
    assert not was_killed(start_client(tmp_path))
    check_jobs(tmp_path)


@pytest.mark.parametrize("failpoint", CRASHES)
def test_a_kill_at_every_step_of_durability_loses_and_doubles_nothing(tmp_path, failpoint):
    assert was_killed(start_client(tmp_path, failpoint))
    check_counts(tmp_path)
    assert not was_killed(start_client(tmp_path))
    check_jobs(tmp_path)


def test_kills_at_random_moments_lose_and_double_nothing(tmp_path):
    moments = random.Random(7)
    num_kills = 0
    while num_kills < NUM_RANDOM_KILLS:
        client = start_client(tmp_path)
        time.sleep(moments.uniform(0.1, 0.25))
        client.kill()
        if not was_killed(client):
            break
        num_kills += 1
        check_counts(tmp_path)
    assert not was_killed(start_client(tmp_path))
    check_jobs(tmp_path)
