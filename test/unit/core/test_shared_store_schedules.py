"""Schedules of ranks that share one store: no block is leased twice, and a sequence may use any part of it."""

from __future__ import annotations

import dataclasses

import pytest
from rank_scenarios import Scenario, outgrowing, tight
from sequence_builders import plan
from virtual_ranks import Log, VirtualRanks
from virtual_sequences import Request

from sgl_batch.core.admission_policy import Forecast, Reserve, TwoPage
from sgl_batch.core.rank_moves import Migration
from sgl_batch.core.replay import replay


def run(scenario: Scenario, migration: Migration, **growth) -> tuple[Log, VirtualRanks]:
    """Run a job on one store of as many pages as its ranks have together, and check the invariants after each step."""
    arguments = scenario.arguments | {"pages": scenario.pages * scenario.num_ranks}
    ranks = VirtualRanks(**arguments, migration=migration, is_shared=True, **growth)
    try:
        log = ranks.run()
        num_sequences = sum(request.choices for request in scenario.requests)
        assert len(log.ended_at) + len(log.refused) == num_sequences, "no sequence starves"
        assert sum(rank.kv.leased.use().leased for rank in ranks.ranks) <= arguments["pages"]
        assert list(replay(ranks.records)) == []
        for rank in ranks.ranks:
            assert list(replay(rank.records)) == []
    except AssertionError as error:
        error.add_note(f"seed {scenario.seed}, step {ranks.log.steps}")
        raise
    return log, ranks


@pytest.mark.parametrize("migration", Migration)
def test_no_block_is_leased_twice_and_every_sequence_finishes(migration):
    logs = [run(tight(seed), migration)[0] for seed in range(15)]
    assert any(log.moved for log in logs) is (migration not in (Migration.NEVER, Migration.PARTITION))
    assert any(log.stayed for log in logs) is (migration not in (Migration.NEVER, Migration.PARTITION))
    assert any(log.partitions for log in logs) is (migration is Migration.PARTITION)


@pytest.mark.parametrize("admission", [TwoPage, Forecast])
@pytest.mark.parametrize("migration", Migration)
def test_no_block_is_leased_twice_where_reservations_grow(migration, admission):
    suspended = 0
    for seed in range(5):
        scenario = outgrowing(seed)
        scenario = dataclasses.replace(scenario, pages=scenario.pages * 2 // 3)
        _, ranks = run(scenario, migration, admission=admission)
        suspended += sum(rank.suspensions for rank in ranks.ranks)
    assert suspended > 0


@pytest.mark.parametrize("admission", [Reserve, TwoPage, Forecast])
def test_a_sequence_larger_than_the_part_of_a_rank_runs(admission):
    """Of 64 pages for 4 ranks it needs 56, while every rank has work for a long time."""
    job_plan = plan(b_moe_prefill=500, b_moe=8, boundary_tokens=4, ready_target=12, page_size=8)
    large = Request(at=6, rank=2, prompt=400, max_new=49, output=49)
    stream = [Request(at=i // 3, rank=i % 4, prompt=20, max_new=30, output=30) for i in range(200)]
    ranks = VirtualRanks(
        [*stream[:18], large, *stream[18:]],
        job_plan,
        num_ranks=4,
        pages=64,
        request_slots=16,
        migration=Migration.EVEN,
        admission=admission,
        is_shared=True,
    )
    log = ranks.run()
    assert log.refused == []
    assert log.ended_at["s18.0"] < log.steps / 2, "smaller ones that arrive later do not pass it for ever"


def test_a_sequence_larger_than_the_store_is_refused():
    sizes = ((500, 20), (9, 2))
    requests = [Request(at=0, rank=1, prompt=prompt, max_new=new, output=new) for prompt, new in sizes]
    ranks = VirtualRanks(
        requests,
        plan(page_size=8),
        num_ranks=2,
        pages=64,
        request_slots=16,
        migration=Migration.EVEN,
        is_shared=True,
    )
    assert ranks.run().refused == ["s0.0"]


def test_one_rank_may_use_nearly_all_blocks_while_the_other_needs_none():
    job_plan = plan(b_moe_prefill=600, b_moe=16, boundary_tokens=8, ready_target=16, page_size=8)
    job = [Request(at=0, rank=0, prompt=40, max_new=40, output=40) for _ in range(32)]

    def steps(*, is_shared: bool) -> int:
        pages = 160 if is_shared else 80
        return (
            VirtualRanks(
                job,
                job_plan,
                num_ranks=2,
                pages=pages,
                request_slots=32,
                migration=Migration.NEVER,
                is_shared=is_shared,
            )
            .run()
            .steps
        )

    assert steps(is_shared=True) < 0.7 * steps(is_shared=False)
