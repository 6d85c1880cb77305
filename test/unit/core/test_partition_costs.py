"""Measured seconds decide whether the last sequences are partitioned, and which prompts are shared."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from rank_builders import PLAN, movable, rank, running
from sequence_builders import sequence

from sgl_batch.core.actions import Partition
from sgl_batch.core.decision_record import group_record
from sgl_batch.core.group_decider import GroupDecider
from sgl_batch.core.group_view import GroupView
from sgl_batch.core.partition_costs import MeasuredPasses, PartitionCosts
from sgl_batch.core.rank_agreement import GroupDecision, decide_group
from sgl_batch.core.rank_moves import Migration
from sgl_batch.core.rank_state import RankState
from sgl_batch.core.replay import replay
from sgl_batch.core.sequence import Status

ALONE = MeasuredPasses(step_s=(1.0, 2.0, 4.0), kv_token_s=0.25, prompt_s=(1.0, 2.0, 4.0))
SHARED = MeasuredPasses(step_s=(0.5, 2.0, 8.0), kv_token_s=0.125, prompt_s=(2.0, 1.5, 2.5))
COSTS = PartitionCosts(
    ranks=2, sequences=(1, 2, 4), prompt_tokens=(16, 32, 64), alone=ALONE, shared=SHARED, move_token_s=0.01
)


def step_s(costs: PartitionCosts, all_rows: int, kv_tokens: int = 0) -> float:
    steps = costs.long_tail(view(1)).costs
    return steps.step_s(rows=1, kv_tokens=kv_tokens, all_rows=all_rows, streams=False)


def view(num_running: int) -> GroupView:
    return GroupView(ranks=(rank(runs=running(num_running)), rank()), plan=PLAN)


def test_a_step_takes_what_was_measured_and_between_two_numbers_what_lies_between():
    assert [step_s(COSTS, rows) for rows in (1, 2, 3, 4, 9)] == [1.0, 2.0, 3.0, 4.0, 4.0]
    assert step_s(COSTS, 1, kv_tokens=8) == 3.0


def test_nothing_is_compared_for_more_sequences_than_were_measured():
    assert [(one.ranks, one.tokens) for one in COSTS.long_tail(view(4)).sets] == [(2, 8000)]
    assert COSTS.long_tail(view(5)).sets == []


def test_prompts_are_shared_from_the_length_on_from_which_that_is_always_faster():
    assert COSTS.least_prompt_tokens == 32
    slower = replace(COSTS, shared=replace(SHARED, prompt_s=(0.1, 0.1, 3.9)))
    assert slower.least_prompt_tokens == 0, "the longest is not 5 % faster"
    assert replace(COSTS, shared=replace(SHARED, prompt_s=(0.1, 0.1, 0.1))).least_prompt_tokens == 16


def test_costs_are_the_same_after_a_record():
    plain = json.loads(json.dumps(COSTS.as_dict()))
    assert PartitionCosts.of(plain) == COSTS
    with pytest.raises(ValueError, match="each measured size"):
        PartitionCosts.of({**plain, "sequences": [1]})


def runner(arrival: int, number: int, *, tokens: int = 0) -> RankState:
    item = movable(arrival, tokens=tokens, status=Status.RUNNING)
    item.sequence.max_new_tokens, item.sequence.ranks = 1000, frozenset((number,))
    return rank(runs=[item])


def decided(ranks: list[RankState], costs: PartitionCosts | None) -> GroupDecision:
    """Return a decision, which its record repeats."""
    decision = decide_group(ranks, PLAN, Migration.EVEN, costs=costs)
    record = group_record(ranks, PLAN, Migration.EVEN, decision, costs=costs)
    assert list(replay([json.loads(json.dumps(record))])) == []
    return decision


def test_the_last_sequences_are_partitioned_where_the_measured_steps_end_sooner():
    alone = [runner(0, 0), rank()]
    assert [type(one) for one in decided(alone, COSTS).actions[0]][:1] == [Partition]
    assert decided(alone, None).partitions == ()
    slower = replace(COSTS, shared=replace(SHARED, step_s=(1.5, 2.0, 8.0), kv_token_s=0.25))
    assert decided(alone, slower).partitions == ()


def test_copies_of_kv_count_against_a_partition():
    costs = replace(COSTS, shared=replace(SHARED, kv_token_s=0.25), move_token_s=10.0)
    assert decided([runner(0, 0, tokens=10), rank()], costs).partitions
    assert decided([runner(0, 0, tokens=500), rank()], costs).partitions == ()


def test_a_record_without_its_costs_differs():
    ranks = [runner(0, 0), rank()]
    record = group_record(ranks, PLAN, Migration.EVEN, decided(ranks, COSTS))
    assert list(replay([json.loads(json.dumps(record))]))


def test_a_prompt_is_shared_by_its_measured_cost_unless_the_plan_says_from_which_length_on():
    def shared(tokens: int, **plan) -> bool:
        ranks = [rank(queued=[sequence(0, prompt=tokens)]), rank()]
        return bool(decide_group(ranks, replace(PLAN, **plan), Migration.EVEN, costs=COSTS).partitions)

    assert [shared(tokens) for tokens in (31, 32)] == [False, True]
    assert [shared(tokens, partition_prompt_tokens=50) for tokens in (32, 49, 50)] == [False, False, True]


def test_a_decider_decides_by_the_costs_that_it_was_given():
    decider, ranks = GroupDecider(Migration.EVEN), [runner(0, 0), rank()]
    assert decider.decide(ranks, PLAN).partitions == ()
    decider.costs = COSTS
    assert decider.decide(ranks, PLAN).partitions
