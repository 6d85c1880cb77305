"""What a group of ranks does next: single decisions, rule by rule."""

from __future__ import annotations

import dataclasses

import pytest
from rank_builders import PLAN, movable, rank, running
from sequence_builders import choices, sequence

from sgl_batch.core.actions import Idle, Migrate, Prefill, Refill
from sgl_batch.core.actions import Step as DecodeStep
from sgl_batch.core.page_boundary import boundary_due
from sgl_batch.core.plan import PhasePlan, Plan
from sgl_batch.core.rank_agreement import (
    GroupDecision,
    GroupStep,
    RankHeader,
    StepKind,
    decide_group,
    next_step,
    rank_is_due,
)
from sgl_batch.core.rank_moves import Migration, Move
from sgl_batch.core.rank_state import RankState
from sgl_batch.core.sequence import Status
from sgl_batch.core.units import FUSED

APART = dataclasses.replace(  # an expert call for each attention sub-batch
    PLAN,
    prefill=PhasePlan(b_attn=50, b_moe=100, yield_option=FUSED),
    decode=PhasePlan(b_attn=4, b_moe=8, yield_option=FUSED),
)


def header(running: int = 0, waiting: int = 0, forked: int = 0, *, due: bool = False) -> RankHeader:
    return RankHeader(running=running, waiting=waiting, forked=forked, due=due)


def decide(*ranks: RankState, plan: Plan = PLAN, migration: Migration = Migration.EVEN) -> GroupDecision:
    return decide_group(ranks, plan, migration)


# The step that all take.


def test_all_ranks_idle_without_sequences():
    assert next_step([header(), header()], PLAN).kind is StepKind.IDLE


def test_all_ranks_decode_while_any_runs_sequences():
    step = next_step([header(running=3), header()], PLAN)
    assert step == GroupStep(kind=StepKind.DECODE, expert_calls=1, any_rank_decodes=True)


def test_one_rank_that_is_due_causes_a_boundary_for_all():
    assert next_step([header(running=3), header(running=5, due=True)], PLAN).kind is StepKind.BOUNDARY


def test_a_waiting_rank_causes_a_boundary_when_no_rank_decodes():
    assert next_step([header(), header(waiting=1)], PLAN) == GroupStep(kind=StepKind.BOUNDARY)


def test_at_a_boundary_all_ranks_know_whether_any_rank_decodes():
    assert next_step([header(running=3, due=True), header(waiting=1)], PLAN).any_rank_decodes


def test_a_waiting_rank_that_is_not_due_lets_the_others_run_on():
    assert next_step([header(running=1), header(waiting=9)], PLAN).kind is StepKind.DECODE


def test_forks_come_before_a_boundary_that_is_due():
    assert next_step([header(running=3, due=True), header(forked=1)], PLAN).kind is StepKind.FORKS


def test_the_rank_with_the_most_rows_sets_the_expert_calls_of_a_decode_step():
    assert next_step([header(running=4), header(running=5)], APART).expert_calls == 2
    assert next_step([header(running=4), header(running=5)], PLAN).expert_calls == 1


def test_the_rank_with_the_most_forks_sets_the_expert_calls_up_to_one_group():
    assert next_step([header(forked=1), header(forked=51)], APART).expert_calls == 2
    assert next_step([header(forked=1), header(forked=5000)], APART).expert_calls == 2
    assert next_step([header(forked=1), header(forked=5000)], PLAN).expert_calls == 1


@pytest.mark.parametrize("changed", [True, False])
@pytest.mark.parametrize("steps", [0, 3, 4, 5])
@pytest.mark.parametrize("waiting", [0, 1, 4, 9])
@pytest.mark.parametrize("runners", [1, 4, 5, 8])
def test_a_rank_with_runners_is_due_as_a_single_rank_is(runners, waiting, steps, changed):
    queued = [sequence(i) for i in range(waiting)]
    state = dataclasses.replace(rank(unmovable_running=runners, queued=queued, steps=steps).state, changed=changed)
    assert rank_is_due(state, PLAN) is boundary_due(state, PLAN)


def test_a_rank_without_runners_is_due_once_for_each_change_of_its_waiting_sequences():
    waiting = rank(queued=[sequence()], steps=1).state
    assert rank_is_due(waiting, PLAN)
    assert not rank_is_due(dataclasses.replace(waiting, changed=False), PLAN)
    assert not rank_is_due(rank(steps=1).state, PLAN)


# Prefill.


def test_all_ranks_prefill_when_one_must():
    """A rank above its watermark prefills too; a rank without a queue takes part without rows."""
    needs = rank(queued=[sequence(0)])
    could = rank(queued=[sequence(1)], runs=running(7, first=10))
    empty = rank(runs=running(2, first=20))
    decision = decide(needs, could, empty)
    assert decision.prefill
    assert decision.busy
    assert [[unit.leader.sequence_id for unit in part.units] for (part,) in decision.actions[:2]] == [["s0"], ["s1"]]
    assert decision.actions[2] == (Idle(),)


def test_a_rank_with_enough_ready_does_not_join_a_prefill():
    full = rank(queued=[sequence(1)], runs=running(8, first=10), ready=[movable(20 + i) for i in range(4)])
    decision = decide(rank(queued=[sequence(0)]), full)
    assert decision.prefill
    assert decision.actions[1] == (Idle(),)


def test_a_rank_whose_head_lacks_pages_does_not_join_a_prefill():
    decision = decide(rank(queued=[sequence(0)]), rank(queued=[sequence(1)], runs=running(7, first=10), free_pages=0))
    assert decision.actions[1] == (Idle(),)


def test_no_sequence_moves_while_the_ranks_prefill():
    assert decide(rank(queued=[sequence(0)]), rank(runs=running(8, first=10)), rank()).moves == ()


def test_the_rank_with_the_most_tokens_sets_the_expert_calls_of_a_prefill():
    long, short = rank(queued=[sequence(0, prompt=450)]), rank(queued=[sequence(1, prompt=40)])
    assert decide(short, long).expert_calls == 5
    assert decide(short, long, plan=APART).expert_calls == 9


def test_the_choices_of_a_prompt_are_prefilled_as_one_unit():
    group = choices(3)
    decision = decide(rank(), rank(queued=group))
    assert isinstance(decision.actions[1][0], Prefill)
    assert [unit.members for unit in decision.actions[1][0].units] == [tuple(group)]


# Refill and decode.


def test_each_rank_refills_from_its_own_ready():
    first = rank(ready=[movable(1), movable(0)], runs=running(3, first=10))
    second = rank(ready=[movable(2)], runs=running(4, first=20))
    decision = decide(first, second)
    assert decision.moves == ()
    assert decision.actions == (
        (Refill(sequences=(first.state.ready[1], first.state.ready[0])),),
        (Refill(sequences=(second.state.ready[0],)),),
    )


def test_a_rank_without_rows_takes_part_while_another_decodes():
    decision = decide(rank(), rank(unmovable_running=3))
    assert decision.actions == ((Idle(),), (DecodeStep(),))
    assert decision.busy
    assert not decision.prefill


def test_a_boundary_without_rows_on_any_rank_is_not_busy():
    assert not decide(rank(), rank()).busy


def test_the_rank_with_the_most_rows_after_its_refill_sets_the_expert_calls():
    few = rank(unmovable_running=4)
    assert decide(few, few, plan=APART).expert_calls == 1
    refilled = rank(unmovable_running=4, unmovable_ready=[sequence(1, status=Status.READY)])
    assert decide(few, refilled, plan=APART).expert_calls == 2


def test_a_sequence_that_moves_is_refilled_at_the_same_boundary():
    decision = decide(rank(ready=[movable(0), movable(1)]), rank())
    assert decision.moves == (Move(sequence_id="s0", source=0, target=1),)
    assert [[s.sequence_id for s in action.sequences] for _, action in decision.actions] == [["s1"], ["s0"]]


def test_moves_are_in_the_list_of_every_rank_before_what_depends_on_them():
    first, second = rank(runs=running(6)), rank()
    decision = decide(first, second)
    moved = tuple(item.sequence for item in first.running[:3])
    assert [actions[0] for actions in decision.actions] == [Migrate(sequences=moved, source=0, target=1)] * 2
    assert [type(action) for actions in decision.actions for action in actions[1:]] == [DecodeStep, Refill]
    assert decision.moves == tuple(Move(sequence_id=f"s{i}", source=0, target=1) for i in range(3))


def test_a_sequence_that_belongs_to_several_ranks_stays():
    source = rank(ready=[movable(0), movable(1), movable(2)])
    source.ready[0].sequence.ranks = frozenset((0, 1))
    assert [move.sequence_id for move in decide(source, rank()).moves] == ["s1"]


def test_a_runner_that_moves_is_refilled_at_the_same_boundary():
    decision = decide(rank(runs=running(2)), rank())
    assert decision.actions[0][-1] == DecodeStep()
    assert [s.sequence_id for s in decision.actions[1][-1].sequences] == ["s0"]


def test_ready_sequences_join_although_moves_leave_room_for_a_prefill():
    """Four of six running sequences leave, and two are below the watermark."""
    waiting = [sequence(20 + i, status=Status.READY) for i in range(2)]
    source = rank(queued=[sequence(30)], unmovable_ready=waiting, runs=running(6))
    decision = decide(source, rank())
    assert len(decision.moves) == 4
    assert not decision.prefill
    assert decision.actions[0][-1] == Refill(sequences=tuple(waiting))


def test_the_expert_calls_suffice_if_every_move_fails():
    source = rank(runs=running(5), unmovable_ready=[sequence(20 + i, status=Status.READY) for i in range(3)])
    decision = decide(source, rank(), plan=APART)
    assert len(decision.moves) == 4
    assert decision.expert_calls == 2, "with all eight still on rank 0"
