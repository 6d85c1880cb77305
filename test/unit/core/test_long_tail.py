"""What is done about the last sequences of a batch: spread, partitioned where it pays, or held level."""

from __future__ import annotations

import dataclasses
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rank_builders import PLAN, movable, rank
from sequence_builders import sequence

from sgl_batch.core.action_checks import fault_of
from sgl_batch.core.actions import EndPartition, Hold, Migrate, Partition
from sgl_batch.core.ended_lengths import EndedLengths
from sgl_batch.core.group_callbacks import Callbacks
from sgl_batch.core.group_view import GroupView
from sgl_batch.core.long_tail import hold_level, on_long_tail, set_size
from sgl_batch.core.rank_agreement import decide_group
from sgl_batch.core.rank_moves import Migration
from sgl_batch.core.rank_state import Movable, RankState
from sgl_batch.core.sequence import Status
from sgl_batch.core.tail_cost import LongTail, Sets

PARTITIONS = dataclasses.replace(PLAN, partition_below=4, partition_least_tokens=100)


def straggler(number: int, *, generated: int = 10, most: int = 1000, tokens: int = 20) -> Movable:
    item = movable(number, tokens=tokens, status=Status.RUNNING)
    item.sequence.generated_tokens, item.sequence.max_new_tokens = generated, most
    return item


def ranks_with(*counts: int, **fields) -> list[RankState]:
    return [
        rank(runs=[straggler(10 * number + i, **fields) for i in range(count)]) for number, count in enumerate(counts)
    ]


def view(ranks: list[RankState], plan=PARTITIONS, **fields) -> GroupView:
    return GroupView(ranks=tuple(ranks), plan=plan, **fields)


def partitions(actions) -> list[tuple[list[str], list[int]]]:
    assert all(isinstance(action, Partition) for action in actions)
    return [([one.sequence_id for one in action.sequences], sorted(action.ranks)) for action in actions]


def test_one_straggler_is_partitioned_over_all_ranks():
    assert partitions(on_long_tail(view(ranks_with(0, 1, 0, 0)))) == [(["s10"], [0, 1, 2, 3])]


def test_two_stragglers_on_four_ranks_are_partitioned_over_two_sets_of_two():
    assert partitions(on_long_tail(view(ranks_with(1, 0, 0, 1)))) == [(["s0"], [0, 1]), (["s30"], [2, 3])]


def test_stragglers_of_one_set_move_to_the_others_before_they_are_partitioned():
    first, second = straggler(0, tokens=30), straggler(1, tokens=20)
    actions = on_long_tail(view([rank(runs=[first, second]), rank(), rank(), rank()]))
    assert actions == (Migrate(sequences=(second.sequence,), source=0, target=2),)


def test_three_stragglers_are_dealt_to_two_sets_of_two():
    found = partitions(on_long_tail(view(ranks_with(1, 1, 1, 0))))
    assert found == [(["s0", "s10"], [0, 1]), (["s20"], [2, 3])]


def test_the_default_plan_partitions_nothing():
    assert set_size(view(ranks_with(0, 1), plan=PLAN)) == 0


def test_nothing_is_partitioned_while_too_many_are_left_or_too_little_is_expected_of_them():
    assert set_size(view(ranks_with(2, 2))) == 2
    assert set_size(view(ranks_with(3, 2))) == 0
    assert set_size(view(ranks_with(1, 0, generated=10, most=200))) == 0, "95 tokens are half of what its limit leaves"
    assert set_size(view(ranks_with(1, 0, generated=10, most=220))) == 2
    assert set_size(view(ranks_with(1, 0), ended=EndedLengths([60, 70]))) == 0, "outputs that were longer ended at 65"


def test_nothing_is_partitioned_while_a_sequence_runs_that_cannot_leave_its_rank():
    assert set_size(view([*ranks_with(1), rank(unmovable_running=1)])) == 0


def test_ranks_that_take_no_replicas_are_not_partitioned():
    ranks = ranks_with(0, 1)
    assert set_size(view([dataclasses.replace(ranks[0], takes_replicas=False), ranks[1]])) == 0
    item = dataclasses.replace(straggler(0), replicable=False)
    assert set_size(view([rank(runs=[item]), rank()])) == 0


def test_without_room_on_a_rank_of_the_set_sequences_are_spread_instead():
    full = rank(free_pages=1)
    spread = (Migrate(sequences=(sequence(5),), source=0, target=1),)
    assert on_long_tail(view([*ranks_with(1), full], evening=spread)) == spread


@dataclasses.dataclass(frozen=True, slots=True)
class Steps:
    """Steps that all take the same time."""

    seconds: float

    def step_s(self, *, rows, kv_tokens, all_rows, streams):
        return self.seconds

    def move_s(self, tokens):
        return 0.0


def test_modelled_cost_decides_where_it_is_known():
    def costs(shared_s: float) -> LongTail:
        sets = [Sets(count=2, ranks=2, costs=Steps(shared_s), tokens=10_000)]
        return LongTail(ranks=4, costs=Steps(1.0), sets=sets, change_s=1.0)

    many = ranks_with(2, 2, 2, 2)
    assert set_size(view(many, plan=PLAN, costs=costs(0.5))) == 2
    assert set_size(view(many, plan=PARTITIONS, costs=costs(1.5))) == 0, "whatever the plan's limits are"


def partitioned(*sets: set[int], num_ranks: int = 4) -> list[RankState]:
    """Return ranks of which the first of each set owns a sequence, of which the others have replicas."""
    ranks = [rank() for _ in range(num_ranks)]
    for over in sets:
        item = straggler(min(over))
        item.sequence.ranks = frozenset(over)
        owner = rank(runs=[item])
        for number in over:
            ranks[number] = dataclasses.replace(rank(unmovable_running=1), partition=frozenset(over), replicas=1)
        ranks[min(over)] = dataclasses.replace(owner, partition=frozenset(over))
    return ranks


def test_a_partition_goes_on_while_it_is_the_one_that_is_wanted():
    assert on_long_tail(view(partitioned({0, 1}, {2, 3}))) == ()


def test_the_last_of_two_partitions_ends_so_that_the_next_is_over_all_ranks():
    assert on_long_tail(view(partitioned({2, 3}))) == (EndPartition(ranks=frozenset({2, 3})),)


@pytest.mark.parametrize(
    "waiting", [{"queued": [sequence(50)]}, {"ready": [movable(50)]}, {"unmovable_ready": [sequence(50)]}], ids=str
)
def test_all_partitions_end_as_soon_as_anything_waits_anywhere(waiting):
    ranks = [*partitioned({0, 1}, {2, 3}), rank(**waiting)]
    decision = decide_group(ranks, PARTITIONS, Migration.EVEN)
    ends = tuple(EndPartition(ranks=frozenset(over)) for over in ({0, 1}, {2, 3}))
    assert all(actions[:2] == ends for actions in decision.actions)
    assert decision.partitions == ()


@settings(deadline=None)
@given(
    counts=st.lists(st.integers(0, 5), min_size=2, max_size=6),
    below=st.integers(0, 12),
    free=st.lists(st.integers(0, 12), min_size=6, max_size=6),
    may_move=st.booleans(),
)
def test_partitions_are_disjoint_whole_and_even_and_every_answer_can_be_carried_out(counts, below, free, may_move):
    plan = dataclasses.replace(PARTITIONS, partition_below=below)
    ranks = [dataclasses.replace(one, free_pages=pages) for one, pages in zip(ranks_with(*counts), free, strict=False)]
    seen = view(ranks, plan=plan, migrates=may_move)
    actions = on_long_tail(seen)
    assert fault_of(actions, seen) is None
    parts = [action for action in actions if isinstance(action, Partition)]
    if not parts:
        return
    assert not any(isinstance(action, Migrate) for action in actions)
    names = Counter(one.sequence_id for part in parts for one in part.sequences)
    assert names == Counter(item.sequence.sequence_id for _, item in seen.running())
    over = Counter(number for part in parts for number in part.ranks)
    assert set(over.values()) == {1}, "no rank is in two sets"
    sizes = [len(part.sequences) for part in parts]
    assert max(sizes) - min(sizes) <= 1


# Level ranks.


def test_a_rank_whose_sequences_end_an_interval_before_the_last_waits():
    ranks = [
        rank(runs=[straggler(0, generated=10, most=60), straggler(1, generated=50, most=60)]),
        rank(runs=[straggler(10, generated=10, most=70)]),
        rank(),
    ]
    ended = EndedLengths([60])
    ranks[1].running[0].sequence.generated_tokens = 5
    assert hold_level(view(ranks, ended=ended)) == (Hold(ranks=frozenset({0})),)
    near = EndedLengths([60])
    ranks[1].running[0].sequence.generated_tokens = 10 - PLAN.boundary_tokens + 1
    assert hold_level(view(ranks, ended=near)) == (), "less than an interval"


def test_of_level_ranks_and_of_one_that_runs_alone_none_waits():
    assert hold_level(view(ranks_with(2, 3))) == ()
    assert hold_level(view(ranks_with(0, 1, 0))) == ()


def test_a_rank_with_sequences_of_which_little_is_known_does_not_wait():
    assert hold_level(view([rank(unmovable_running=2), *ranks_with(1)])) == ()


def test_a_held_rank_decodes_nothing_and_the_others_go_on():
    hold = (Hold(ranks=frozenset({0})),)
    callbacks = Callbacks(on_long_tail=lambda seen: hold, names={"on_long_tail": "a:b"})
    decision = decide_group(ranks_with(5, 1), PLAN, Migration.EVEN, callbacks)
    assert decision.held == {0}
    assert (decision.busy, decision.expert_calls, decision.moves) == (True, 1, ())
