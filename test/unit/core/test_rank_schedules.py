"""Whole schedules of a group of virtual ranks: together in each step, all sequences finish, no page is lost."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from rank_scenarios import Scenario, roomy, tight
from sequence_builders import plan
from virtual_ranks import Log, VirtualRanks
from virtual_sequences import Request

from sgl_batch.core.rank_moves import Migration


def run(scenario: Scenario, migration: Migration) -> Log:
    """Run a job and check the invariants after each step; a failure names the seed."""
    ranks = VirtualRanks(
        **scenario.arguments,
        migration=migration,
    )
    try:
        log = ranks.run()
        num_sequences = sum(request.choices for request in scenario.requests)
        assert len(log.ended_at) + len(log.refused) == num_sequences, "no sequence starves"
    except AssertionError as error:
        error.add_note(f"seed {scenario.seed}, step {ranks.log.steps}")
        raise
    return log


def run_all(make: Callable[[int], Scenario], migration: Migration, seeds: int) -> list[Log]:
    return [run(make(seed), migration) for seed in range(seeds)]


@pytest.mark.parametrize("migration", Migration)
def test_ranks_stay_together_and_every_sequence_finishes_under_pressure(migration):
    logs = run_all(tight, migration, seeds=24)
    assert sum(log.steps for log in logs) > 2500
    moves = migration not in (Migration.NEVER, Migration.PARTITION)
    assert any(log.moved for log in logs) is moves
    assert any(log.stayed for log in logs) is moves
    assert any(log.partitions for log in logs) is (migration is Migration.PARTITION)
    assert any(log.undone for log in logs) is (migration is Migration.PARTITION)


@pytest.mark.parametrize("migration", Migration)
def test_ranks_stay_together_and_every_sequence_finishes_with_room_for_all(migration):
    run_all(roomy, migration, seeds=10)


def test_evened_out_ranks_run_equal_numbers_give_or_take_one():
    active = [counts for log in run_all(roomy, Migration.EVEN, seeds=15) for counts in log.active]
    assert len(active) > 300
    assert all(max(counts) - min(counts) <= 1 for counts in active)


def test_without_migration_ranks_run_their_own_arrivals():
    """This shows that the rule above does not hold by accident of the jobs."""
    active = [counts for log in run_all(roomy, Migration.NEVER, seeds=15) for counts in log.active]
    assert any(max(counts) - min(counts) > 1 for counts in active)


def test_a_head_that_waits_for_pages_is_not_overtaken_by_sequences_from_other_ranks():
    """Rank 1's last request needs nearly all pages, while rank 0 has work for a long time."""
    job_plan = plan(b_moe_prefill=200, b_moe=8, boundary_tokens=4, ready_target=12, page_size=8)
    small = [Request(at=0, rank=1, prompt=8, max_new=20, output=20) for _ in range(3)]
    large = Request(at=1, rank=1, prompt=400, max_new=40, output=4)
    stream = [Request(at=i // 2, rank=0, prompt=20, max_new=60, output=60) for i in range(200)]
    ranks = VirtualRanks(
        [*small, large, *stream], job_plan, num_ranks=2, pages=64, request_slots=16, migration=Migration.EVEN
    )
    log = ranks.run()
    assert log.ended_at["s3.0"] < 40 < log.steps / 10


def test_a_job_that_came_to_one_rank_is_done_by_both():
    job_plan = plan(b_moe_prefill=256, b_moe=16, boundary_tokens=8, ready_target=24, page_size=8)
    job = [Request(at=0, rank=0, prompt=20, max_new=40, output=40) for _ in range(300)]

    def log(migration: Migration) -> Log:
        return VirtualRanks(job, job_plan, num_ranks=2, pages=2000, request_slots=32, migration=migration).run()

    even, never = log(Migration.EVEN), log(Migration.NEVER)
    assert even.steps < 0.65 * never.steps
    assert even.moved_in_queues > never.moved_in_queues == 0
