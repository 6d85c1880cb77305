"""How ranks are refilled: with their own sequences, with those that others cannot run, and then by prefill."""

from __future__ import annotations

import dataclasses

from hypothesis import given, settings
from hypothesis import strategies as st
from rank_builders import PLAN, movable, rank, running
from sequence_builders import sequence

from sgl_batch.core.actions import Refill
from sgl_batch.core.group_callbacks import BUILT_IN, Callbacks
from sgl_batch.core.rank_agreement import GroupDecision, decide_group
from sgl_batch.core.rank_moves import Migration
from sgl_batch.core.rank_state import RankState
from sgl_batch.core.refill import prefill_first
from sgl_batch.core.sequence import Status

# Below 6 of 8, which is the watermark.
QUEUE = [sequence(900, prompt=20)]


def decide(*ranks: RankState, migration: Migration = Migration.EVEN, callbacks=BUILT_IN) -> GroupDecision:
    return decide_group(ranks, PLAN, migration, callbacks)


def rich(ready: int = 6, **fields) -> RankState:
    """Return a rank that runs eight sequences, as many as it can, and has more that wait."""
    return rank(runs=running(8, first=100), ready=[movable(200 + i) for i in range(ready)], **fields)


def test_a_rank_that_lacks_sequences_gets_those_that_others_cannot_run_instead_of_a_prefill():
    decision = decide(rank(queued=QUEUE, runs=running(3)), rich())
    assert not decision.prefill
    assert [(move.sequence_id, move.source, move.target) for move in decision.moves] == [
        ("s200", 1, 0),
        ("s201", 1, 0),
        ("s202", 1, 0),
    ]
    assert isinstance(decision.actions[0][-1], Refill)
    assert [one.sequence_id for one in decision.actions[0][-1].sequences] == ["s200", "s201", "s202"]


def test_where_all_lack_sequences_they_prefill():
    assert decide(rank(queued=QUEUE, runs=running(3)), rich(2)).prefill, "two are fewer than three"
    assert decide(rank(queued=QUEUE, runs=running(3)), rank(runs=running(7, first=50))).prefill


def test_a_rank_keeps_the_sequences_that_it_can_run_itself():
    donor = rank(runs=running(5, first=100), ready=[movable(200 + i) for i in range(5)])
    assert decide(rank(queued=QUEUE, runs=running(3)), donor).prefill
    assert not decide(rank(queued=QUEUE, runs=running(4)), donor).prefill


def test_prefill_that_has_begun_goes_on():
    lacking = rank(queued=QUEUE, runs=running(3))
    filling = dataclasses.replace(lacking, state=dataclasses.replace(lacking.state, filling=True))
    assert decide(filling, rich()).prefill


def test_without_migration_ranks_prefill():
    assert decide(rank(queued=QUEUE, runs=running(3)), rich(), migration=Migration.NEVER).prefill


def test_room_is_kept_for_the_prompt_at_the_head_of_the_queue():
    """It needs three pages, of 8 tokens each, and each sequence that would move takes two."""
    lacking = rank(queued=QUEUE, runs=running(5), free_pages=4)
    assert decide(lacking, rich()).prefill
    assert not decide(dataclasses.replace(lacking, free_pages=5), rich()).prefill


def test_prefill_first_is_as_it_says():
    callbacks = Callbacks(on_refill=prefill_first, names={"on_refill": "prefill_first"})
    assert decide(rank(queued=QUEUE, runs=running(3)), rich(), callbacks=callbacks).prefill
    decision = decide(rank(ready=[movable(0), movable(1)]), rank(), callbacks=callbacks)
    assert len(decision.moves) == 1, "counts are evened out"


@settings(deadline=None)
@given(
    ranks=st.lists(st.tuples(st.integers(0, 8), st.integers(0, 10), st.booleans()), min_size=2, max_size=4),
    pages=st.integers(3, 40),
)
def test_after_moves_instead_of_a_prefill_no_rank_with_a_queue_is_below_its_watermark(ranks, pages):
    states = [
        rank(
            runs=running(runs, first=100 * i),
            ready=[movable(100 * i + 50 + j, status=Status.READY) for j in range(ready)],
            queued=[sequence(900 + i, prompt=20)] if queued else [],
            free_pages=pages,
        )
        for i, (runs, ready, queued) in enumerate(ranks)
    ]
    decision = decide(*states)
    after = [one.num_resident for one in states]
    for move in decision.moves:
        after[move.source] -= 1
        after[move.target] += 1
    lacked = [number for number, one in enumerate(states) if one.state.queued and one.num_resident < 6]
    if decision.prefill:
        assert lacked
        assert decision.moves == ()
    else:
        fits = [number for number in lacked if states[number].free_pages >= 4]
        assert all(after[number] >= 6 for number in fits)
        assert min(after) >= 0
