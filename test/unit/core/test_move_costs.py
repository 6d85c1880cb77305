"""A sequence moves as tokens where its KV is computed sooner than it is sent, and where it has none."""

from __future__ import annotations

from dataclasses import replace

import pytest
from rank_builders import PLAN, movable, rank, running

from sgl_batch.core.actions import Actions, Migrate
from sgl_batch.core.decision_record import group_record
from sgl_batch.core.group_callbacks import Callbacks
from sgl_batch.core.group_view import GroupView
from sgl_batch.core.move_costs import MoveRates, RateMeter, moves_as_tokens
from sgl_batch.core.rank_agreement import GroupDecision, decide_group
from sgl_batch.core.rank_moves import Migration
from sgl_batch.core.rank_state import RankState
from sgl_batch.core.replay import replay
from sgl_batch.core.sequence import Status

SLOW_WIRE = MoveRates(sent_per_s=10.0, computed_per_s=1000.0)
FAST_WIRE = MoveRates(sent_per_s=1000.0, computed_per_s=10.0)


def decide(*ranks: RankState, migration: Migration = Migration.EVEN) -> GroupDecision:
    states = list(ranks)
    decision = decide_group(states, PLAN, migration)
    assert list(replay([group_record(states, PLAN, migration, decision)])) == []
    return decision


def with_queue(*arrivals: int, runs: int, free_pages: int = 1000) -> RankState:
    """A rank that decodes enough to begin no prefill, with a queue that may leave it."""
    queued = [movable(i, tokens=0, status=Status.QUEUED) for i in arrivals]
    own = rank(
        queued=[item.sequence for item in queued], runs=running(runs, first=50, tokens=30), free_pages=free_pages
    )
    return replace(own, queued=queued)


@pytest.mark.parametrize(
    ("rates", "cheaper"),
    [(SLOW_WIRE, True), (FAST_WIRE, False), (MoveRates(computed_per_s=9.0), False), (MoveRates(sent_per_s=9.0), False)],
    ids=["the wire is slow", "the wire is fast", "nothing was sent yet", "nothing was computed yet"],
)
def test_kv_is_computed_again_only_where_both_rates_are_known_and_that_is_quicker(rates: MoveRates, cheaper: bool):
    assert moves_as_tokens(640, rates) is cheaper


def test_a_meter_has_no_rate_before_it_has_measured_and_the_mean_afterwards():
    meter = RateMeter()
    assert meter.rates == MoveRates()
    meter.note_sent(100, 1.0)
    meter.note_sent(300, 1.0)
    meter.note_computed(50, 0.5)
    assert meter.rates == MoveRates(sent_per_s=200.0, computed_per_s=100.0)


@pytest.mark.parametrize(("rates", "as_tokens"), [(SLOW_WIRE, True), (FAST_WIRE, False)])
def test_a_running_sequence_moves_in_the_quicker_way(rates: MoveRates, as_tokens: bool):
    source = replace(rank(runs=running(3)), sends_pages=True, rates=rates)
    (move,) = decide(source, rank(runs=running(1, first=10))).moves
    assert move.as_tokens is as_tokens


def test_a_sequence_whose_kv_lies_in_a_shared_store_keeps_it():
    source = replace(rank(runs=running(3)), rates=SLOW_WIRE)
    (move,) = decide(source, rank(runs=running(1, first=10))).moves
    assert not move.as_tokens


def test_a_sequence_that_a_callback_moves_keeps_its_kv():
    """A callback that moves it at each boundary would have it computed anew each time."""

    def to_the_next_rank(view: GroupView) -> Actions:
        return (Migrate(sequences=(view.ranks[0].running[0].sequence,), source=0, target=1),)

    ranks = [replace(rank(runs=running(2)), sends_pages=True, rates=SLOW_WIRE), rank(runs=running(1, first=10))]
    callbacks = Callbacks(on_refill=to_the_next_rank, on_long_tail=to_the_next_rank)
    (move,) = decide_group(ranks, PLAN, Migration.EVEN, callbacks).moves
    assert not move.as_tokens


def test_a_sequence_keeps_its_kv_where_the_target_would_not_prefill_it_next():
    """It would wait there, in place of running on."""
    source = replace(rank(runs=running(8)), sends_pages=True, rates=SLOW_WIRE)
    moves = decide(source, rank(runs=running(6, first=10))).moves
    assert [move.as_tokens for move in moves] == [False]


def test_queued_sequences_move_first_in_their_order_and_have_no_kv_to_send():
    moves = decide(with_queue(0, 1, 2, 3, runs=7), rank(runs=running(3, first=20))).moves
    assert [(move.sequence_id, move.as_tokens) for move in moves][:3] == [("s0", True), ("s1", True), ("s2", True)]


def test_queued_sequences_go_only_to_ranks_that_prefill_them_next():
    moves = decide(with_queue(0, 1, 2, 3, runs=8), rank(runs=running(6, first=20))).moves
    assert [move.as_tokens for move in moves] == [False, False], "6 of 8 rows are enough to go on decoding"


def test_a_sequence_that_moves_as_tokens_is_no_row_of_the_next_step():
    source = replace(rank(runs=running(4)), sends_pages=True)
    decision = decide(source, rank(), migration=Migration.AS_TOKENS)
    assert [move.as_tokens for move in decision.moves] == [True] * 4
    assert not decision.busy


def test_for_tests_waiting_sequences_stay_until_they_have_run():
    source = replace(rank(ready=[movable(0)], runs=running(1, first=1)), sends_pages=True)
    decision = decide(source, rank(runs=running(1, first=2)), migration=Migration.AS_TOKENS)
    assert [move.sequence_id for move in decision.moves if move.source == 0] == ["s1"]
