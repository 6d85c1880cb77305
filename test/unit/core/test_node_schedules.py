"""Schedules of a node's ranks with one store: any rank with room runs what waits longest, and all sequences end."""

from __future__ import annotations

import random

import pytest
from sequence_builders import plan
from virtual_node import Job, NodeLog, VirtualNode

from sgl_batch.core.admission_policy import Forecast, Reserve, TwoPage
from sgl_batch.core.plan import Plan
from sgl_batch.core.rank_moves import Migration
from sgl_batch.core.replay import replay

PLAN = plan(b_moe_prefill=200, b_moe=8, boundary_tokens=8, ready_target=12, page_size=8)


def tight(seed: int) -> tuple[list[Job], Plan, dict[str, int]]:
    """Return a job with few pages of devices and store, sequences that may not leave, and one rank that gets most."""
    rng = random.Random(seed)
    ranks, at, jobs = rng.choice((2, 3, 4)), 0, []
    to_first = rng.choice((0.0, 0.5, 1.0))
    for _ in range(rng.randint(5, 40)):
        at += rng.choice((0, 0, 0, 1, 5))
        new = rng.randint(1, 60)
        rank = 0 if rng.random() < to_first else rng.randrange(ranks)
        stays = rng.random() < 0.15
        jobs.append(Job(at=at, rank=rank, prompt=rng.randint(1, 80), new=new, output=rng.randint(1, new), stays=stays))
    b_moe = rng.randint(1, 10)
    job_plan = plan(
        b_moe_prefill=rng.randint(20, 200),
        b_moe=b_moe,
        boundary_tokens=rng.randint(1, 16),
        ready_target=b_moe + rng.randint(0, 12),
        page_size=8,
    )
    return jobs, job_plan, {"num_ranks": ranks, "device": rng.randint(20, 60), "store": rng.randint(24, 160)}


@pytest.mark.parametrize("admission", [Reserve, TwoPage, Forecast])
@pytest.mark.parametrize("migration", Migration)
def test_every_sequence_ends_and_no_block_is_leased_twice(admission, migration):
    moved = suspended = 0
    for seed in range(10, 25):
        jobs, job_plan, sizes = tight(seed)
        node = VirtualNode(jobs, job_plan, **sizes, migration=migration, admission=admission)
        try:
            log = node.run()
            assert list(replay(node.records)) == []
        except AssertionError as error:
            error.add_note(f"seed {seed}, step {node.log.steps}")
            raise
        moved, suspended = moved + log.moved, suspended + log.suspended
    assert suspended > 0
    assert (moved > 0) is (migration not in (Migration.NEVER, Migration.PARTITION))


def run(jobs: list[Job], **sizes: object) -> NodeLog:
    return VirtualNode(jobs, PLAN, **{"num_ranks": 2, "device": 40, "store": 400, **sizes}).run()


def test_what_waits_on_one_rank_runs_on_all():
    """All come to one rank; its device has pages for few of them."""
    jobs = [Job(at=0, rank=0, prompt=40, new=40, output=40) for _ in range(40)]
    alone = run(jobs, migration=Migration.NEVER)
    together = run(jobs)
    assert together.steps < 0.65 * alone.steps
    assert together.moved >= 15


def test_equal_sequences_end_in_the_order_of_their_turns_whichever_rank_held_them():
    """All prompts are computed at once, of which rank 0 has three times as many."""
    jobs = [Job(at=0, rank=int(number % 4 == 3), prompt=40, new=41, output=41) for number in range(48)]
    at_once = plan(b_moe_prefill=2000, b_moe=8, boundary_tokens=8, ready_target=48, page_size=8)
    log = VirtualNode(jobs, at_once, num_ranks=2, device=100, store=600).run()
    on_ranks = ([number for number in range(48) if jobs[number].rank == rank] for rank in range(2))
    turns = sorted((turn, number) for numbers in on_ranks for turn, number in enumerate(numbers))
    ended = [log.ended[f"s{number}"] for _, number in turns]
    assert ended == sorted(ended)
    assert log.moved > 0


def test_ranks_run_equal_numbers_while_sequences_wait():
    jobs = [Job(at=0, rank=0, prompt=30, new=40, output=10 + number) for number in range(30)]
    log = run(jobs, device=400)
    busy = [rows for rows in log.rows if sum(rows) > 2]
    assert busy
    assert all(max(rows) - min(rows) <= 1 for rows in busy)


def test_sequences_that_may_not_leave_are_restored_where_they_are():
    jobs = [Job(at=0, rank=0, prompt=40, new=40, output=40, stays=True) for _ in range(10)]
    assert run(jobs).moved == 0


def test_a_large_sequence_is_not_passed_for_ever_by_smaller_ones():
    """It needs the whole device of any rank, while others come all the time."""
    large = Job(at=2, rank=1, prompt=240, new=60, output=60)
    stream = [Job(at=number // 2, rank=number % 2, prompt=20, new=30, output=30) for number in range(150)]
    log = run([*stream[:10], large, *stream[10:]])
    assert log.ended["s10"] < log.steps / 2
