"""One long prompt is shared by all ranks where no other rank has a prompt and all have room for a replica of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace

import pytest
from rank_builders import PLAN, movable, rank, running
from rank_scenarios import Scenario, roomy, tight
from sequence_builders import choices, sequence
from virtual_ranks import Log, VirtualRanks

from sgl_batch.core.actions import Idle, Partition, Prefill
from sgl_batch.core.decision_record import group_record
from sgl_batch.core.rank_agreement import GroupDecision, decide_group
from sgl_batch.core.rank_moves import Migration
from sgl_batch.core.rank_state import RankState
from sgl_batch.core.replay import replay
from sgl_batch.core.sequence import SequenceState

LEAST = 40
SHARING = replace(PLAN, partition_prompt_tokens=LEAST)


def decided(*ranks: RankState, plan=SHARING) -> GroupDecision:
    """Return a decision, which its record repeats."""
    decision = decide_group(ranks, plan, Migration.EVEN)
    record = json.loads(json.dumps(group_record(ranks, plan, Migration.EVEN, decision)))
    assert list(replay([record])) == []
    return decision


def prompt(tokens: int = LEAST, **fields) -> SequenceState:
    return replace(sequence(5, prompt=tokens), ranks=frozenset((1,)), **fields)


def test_the_only_prompt_of_a_phase_is_shared_by_all_ranks_from_the_plans_length_on():
    decision = decided(rank(), rank(queued=[prompt()]), rank(runs=running(2)))
    (partition,) = decision.partitions
    assert ([one.sequence_id for one in partition.sequences], partition.ranks) == (["s5"], {0, 1, 2})
    assert [[type(one) for one in part] for part in decision.actions] == [
        [Partition, Idle],
        [Partition, Prefill],
        [Partition, Idle],
    ]
    assert decision.prefill
    assert decision.expert_calls == decided(rank(), rank(queued=[prompt()]), plan=PLAN).expert_calls


def test_the_choices_of_a_shared_prompt_stay_with_its_owner():
    decision = decided(rank(queued=choices(3, prompt=LEAST)), rank())
    assert [one.sequence_id for one in decision.partitions[0].sequences] == ["s0"]
    assert len(decision.actions[0][-1].units[0].members) == 3


@pytest.mark.parametrize(
    ("other", "queued"),
    [
        ({}, [prompt(LEAST - 1)]),
        ({}, [prompt(), sequence(6)]),
        ({}, [prompt(generated_tokens=3)]),
        ({}, [prompt(shared_tokens=8)]),
        ({"queued": [sequence(7)]}, [prompt()]),
        ({"free_pages": 4}, [prompt()]),
        ({"free_request_slots": 0, "runs": running(1)}, [prompt()]),
    ],
    ids=["too short", "two prompts", "it has tokens", "it shares pages", "another rank's prompt", "pages", "slots"],
)
def test_a_prompt_is_computed_alone(other, queued):
    decision = decided(rank(**other), rank(queued=queued))
    assert decision.prefill
    assert decision.partitions == ()


@pytest.mark.parametrize("fields", [{"takes_replicas": False}, {"has_waiting": True}])
def test_a_rank_that_takes_no_replicas_takes_none_of_a_prompt(fields):
    assert decided(replace(rank(), **fields), rank(queued=[prompt()])).partitions == ()


def test_a_rank_without_replicas_shares_no_prompt_of_its_own():
    assert decided(rank(), replace(rank(queued=[prompt()]), takes_replicas=False)).partitions == ()


def test_the_rest_of_a_begun_prompt_is_computed_alone():
    begun = rank()
    begun = replace(begun, state=replace(begun.state, begun=prompt(80, computed_tokens=16)))
    decision = decided(begun, rank())
    assert decision.prefill
    assert decision.partitions == ()


def test_ready_sequences_of_other_ranks_do_not_keep_a_prompt_from_being_shared():
    assert decided(rank(ready=[movable(1)]), rank(queued=[prompt()])).partitions


def sharing(scenario: Scenario, least: int = 10) -> Scenario:
    return replace(scenario, plan=replace(scenario.plan, partition_prompt_tokens=least))


def run(make: Callable[[int], Scenario], seed: int, migration: Migration) -> Log:
    ranks = VirtualRanks(**sharing(make(seed)).arguments, migration=migration)
    try:
        log = ranks.run()
        num_sequences = sum(request.choices for request in make(seed).requests)
        assert len(log.ended_at) + len(log.refused) == num_sequences, "no sequence starves"
    except AssertionError as error:
        error.add_note(f"seed {seed}, step {ranks.log.steps}")
        raise
    return log


@pytest.mark.parametrize("migration", [Migration.EVEN, Migration.PARTITION])
@pytest.mark.parametrize("make", [tight, roomy])
def test_ranks_that_share_prompts_stay_together_and_every_sequence_finishes(make, migration):
    logs = [run(make, seed, migration) for seed in range(30)]
    assert sum(log.prompts_shared for log in logs) > 30


def test_sharing_prompts_changes_no_step():
    """A shared pass takes the place of one rank's pass, so that all sequences end at the same steps."""
    for seed in range(20):
        alone = VirtualRanks(**tight(seed).arguments, migration=Migration.EVEN).run()
        shared = run(tight, seed, Migration.EVEN)
        assert shared.ended_at == alone.ended_at, f"seed {seed}"
