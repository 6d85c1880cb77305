"""Several ranks whose reservations grow: all sequences end, no rank's pages run out, and decisions replay."""

from __future__ import annotations

import dataclasses
import random

import pytest
from rank_builders import PLAN, movable, rank, running
from rank_scenarios import outgrowing
from sequence_builders import sequence
from virtual_ranks import VirtualRanks

from sgl_batch.core.actions import Idle, Prefill
from sgl_batch.core.admission import Admission, note_expected, select_prefill_group
from sgl_batch.core.admission_policy import Forecast, TwoPage
from sgl_batch.core.page_ledger import PageLedger
from sgl_batch.core.rank_agreement import decide_group
from sgl_batch.core.rank_moves import Migration, plan_moves
from sgl_batch.core.rank_state import Movable, RankState
from sgl_batch.core.replay import replay

# Jobs in which sequences move, outgrow their reservations and give way; and the pages to which they can.
OVERFLOW_PAGES = {3: 20, 4: 0, 9: 20, 12: 1000}


def grown(state: RankState, **fields) -> RankState:
    return dataclasses.replace(state, grows=True, **fields)


def growing(arrival: int, *, pages: int, gap: int) -> Movable:
    return dataclasses.replace(movable(arrival, pages=pages), gap=gap)


def moved(source: RankState, target: RankState, migration: Migration = Migration.EVEN) -> list[str]:
    return [move.sequence_id for move in plan_moves([source, target], PLAN, migration)]


@pytest.mark.parametrize("admission", [TwoPage, Forecast])
@pytest.mark.parametrize("migration", Migration)
def test_whatever_moves_all_end_nothing_runs_out_and_decisions_replay(admission, migration):
    num_moved = num_partitions = suspended = away = 0
    for seed, overflow_pages in OVERFLOW_PAGES.items():
        scenario = outgrowing(seed)
        ranks = VirtualRanks(
            **scenario.arguments,
            migration=migration,
            admission=admission,
            overflow_pages=overflow_pages,
            restore_steps=seed % 5,
        )
        try:
            log = ranks.run()
            num_sequences = sum(request.choices for request in scenario.requests)
            assert len(log.ended_at) + len(log.refused) == num_sequences, "no sequence starves"
            for one in ranks.ranks:
                assert (one.ledger.borrower, one.ledger.stalled, one.ledger.away) == (None, {}, set())
                assert list(replay(one.records)) == []
            assert list(replay(ranks.records)) == []
        except AssertionError as error:
            error.add_note(f"seed {seed}, step {ranks.log.steps}")
            raise
        num_moved, num_partitions = num_moved + log.moved, num_partitions + log.partitions
        suspended += sum(one.suspensions for one in ranks.ranks)
        away += sum(one.overflow.taken for one in ranks.ranks)
    assert (num_moved > 0) is (migration not in (Migration.NEVER, Migration.PARTITION))
    assert (num_partitions > 0) is (migration is Migration.PARTITION)
    assert min(suspended, away) > 0


def test_a_sequence_moves_where_it_fits_with_the_pages_that_it_may_still_need():
    source = grown(rank(ready=[growing(0, pages=3, gap=8), growing(1, pages=3, gap=2)]))
    assert moved(source, grown(rank(free_pages=10))) == ["s1"]
    assert moved(source, grown(rank(free_pages=11))) == ["s0"]
    assert moved(source, grown(rank(free_pages=3), largest_gap=8)) == ["s0"], "8 pages are kept for another's gap"


def test_the_gap_of_an_arrival_counts_for_the_next():
    many = grown(rank(ready=[growing(0, pages=3, gap=8), *(growing(i, pages=3, gap=2) for i in range(1, 8))]))
    assert moved(many, grown(rank(free_pages=17))) == ["s0", "s1", "s2"], "9 pages and a gap of 8"


@pytest.mark.parametrize("migration", [Migration.EVEN, Migration.ALWAYS])
def test_no_sequence_moves_to_a_rank_where_others_wait_for_pages(migration):
    source = grown(rank(runs=running(4)))
    assert moved(source, grown(rank(), has_waiting=True), migration=migration) == []


def test_a_rank_where_sequences_wait_for_pages_prefills_nothing_while_others_do():
    waits = grown(rank(queued=[sequence(0)]), has_waiting=True)
    decision = decide_group([waits, grown(rank(queued=[sequence(1)]))], PLAN, Migration.EVEN)
    assert [type(part) for (part,) in decision.actions] == [Idle, Prefill]


def test_the_control_rank_admits_what_the_rank_itself_would():
    """Each rank notes what it expects; the control rank sees the sums of its account, and no owners."""
    policy, rng = Forecast(), random.Random(0)
    policy.finished(sequence(99), 60)
    for _ in range(50):
        queued = [sequence(i, prompt=rng.randint(1, 60), new=rng.randint(1, 200)) for i in range(12)]
        account = PageLedger(rng.randint(60, 110), PLAN.page_size, policy=policy)
        account.reserve("a", 5, whole=rng.randint(5, 30))
        account.reserve("b", rng.randint(1, 9), whole=10)
        for one in queued:
            note_expected(Admission(leader=one), policy)
        seen = RankState.of(rank(queued=queued).state, account, None, ((), ())).ledger(PLAN.page_size)
        units = [Admission(leader=one) for one in queued]
        chosen = [
            select_prefill_group(units, ledger, b_moe=1000, free_request_slots=99, plan=PLAN)
            for ledger in (account, seen)
        ]
        assert chosen[0] == chosen[1]
        assert 0 < len(chosen[0]) < 12
