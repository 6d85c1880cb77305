"""Which moves are prepared by copies of full pages, and when their sequences follow."""

from __future__ import annotations

from dataclasses import replace

import pytest
from rank_builders import PLAN, in_set, movable, rank, running
from sequence_builders import sequence

from sgl_batch.core import early_copies
from sgl_batch.core.actions import Actions, Migrate
from sgl_batch.core.decision_record import group_record
from sgl_batch.core.early_copies import EarlyCopy, HeldCopy, least_worth_preparing, within_limits
from sgl_batch.core.group_callbacks import Callbacks
from sgl_batch.core.group_view import GroupView
from sgl_batch.core.partition import refusal, whole_set
from sgl_batch.core.rank_agreement import GroupDecision, decide_group
from sgl_batch.core.rank_moves import Migration, Move, in_phases
from sgl_batch.core.rank_state import RankState
from sgl_batch.core.replay import replay

SIZE = PLAN.page_size
LONG = 9 * SIZE + 1


def sending(*ranks: RankState, held: tuple[HeldCopy, ...] = ()) -> list[RankState]:
    """Ranks that send their pages to each other; the last one holds these copies."""
    states = [replace(one, sends_pages=True) for one in ranks]
    return [*states[:-1], replace(states[-1], held=held)]


def decide(ranks: list[RankState], migration: Migration = Migration.EVEN) -> GroupDecision:
    decision = decide_group(ranks, PLAN, migration)
    assert list(replay([group_record(ranks, PLAN, migration, decision)])) == []
    return decision


def copied(decision: GroupDecision) -> list[tuple[str, int, int]]:
    return [(copy.sequence_id, copy.source, copy.target) for copy in decision.copies]


def holds(name: str, *, arrived: bool = True) -> tuple[HeldCopy, ...]:
    return (HeldCopy(sequence_id=name, source=0, arrived=arrived),)


def test_a_sequence_with_many_full_pages_is_copied_first_and_stays_meanwhile():
    decision = decide(sending(rank(runs=running(3, tokens=LONG, pages=12)), rank(runs=running(1, first=10))))
    assert decision.moves == ()
    assert decision.copies == (EarlyCopy(sequence_id="s0", source=0, target=1, full_pages=9, pages=12, gap=0),)


def test_a_sequence_moves_at_once_if_a_boundary_would_copy_as_much_anyway():
    least = least_worth_preparing(PLAN) * SIZE
    decision = decide(sending(rank(runs=running(3, tokens=least - 1)), rank(runs=running(1, first=10))))
    assert ([move.sequence_id for move in decision.moves], copied(decision)) == (["s0"], [])
    decision = decide(sending(rank(runs=running(3, tokens=least)), rank(runs=running(1, first=10))))
    assert ([move.sequence_id for move in decision.moves], copied(decision)) == ([], [("s0", 0, 1)])


def test_where_no_rank_decodes_sequences_move_at_once():
    waiting = [movable(i, tokens=LONG) for i in range(4)]
    decision = decide(sending(rank(ready=waiting), rank()))
    assert ([move.sequence_id for move in decision.moves], copied(decision)) == (["s0", "s1"], [])


def test_sequences_in_a_store_that_the_ranks_share_move_at_once():
    decision = decide([rank(runs=running(3, tokens=LONG)), rank(runs=running(1, first=10))])
    assert ([move.sequence_id for move in decision.moves], copied(decision)) == (["s0"], [])


def test_a_sequence_follows_its_copy_when_all_of_it_has_arrived():
    runs = running(3, tokens=LONG), running(1, first=10)
    ranks = sending(rank(runs=runs[0]), rank(runs=runs[1]), held=holds("s2"))
    decision = decide(ranks)
    assert decision.moves == (Move(sequence_id="s2", source=0, target=1, prepared=True),)
    assert decision.copies == ()


def test_while_copies_are_under_way_none_begins_and_their_sequences_stay():
    small = movable(9, tokens=1)
    ranks = sending(rank(runs=[*running(6, tokens=LONG), small]), rank(), held=holds("s0", arrived=False))
    decision = decide(ranks)
    assert [move.sequence_id for move in decision.moves] == ["s9"], "it needs no copy"
    assert decision.copies == ()


@pytest.mark.parametrize("migration", [Migration.EVEN, Migration.PREPARED])
def test_a_prepared_move_needs_no_free_pages(migration: Migration):
    target = rank(runs=running(1, first=10), free_pages=0)
    decision = decide(sending(rank(runs=running(4, tokens=LONG, pages=12)), target, held=holds("s1")), migration)
    assert [move.sequence_id for move in decision.moves if move.source == 0] == ["s1"]


def test_a_copy_whose_sequence_has_ended_is_followed_by_no_move():
    assert decide(sending(rank(runs=running(1)), rank(runs=running(1, first=10)), held=holds("s7"))).moves == ()


def test_a_sequence_does_not_follow_its_copy_to_a_rank_that_is_full_or_not_emptier_any_more():
    source = rank(runs=running(3, tokens=LONG))
    assert decide(sending(source, rank(runs=running(2, first=10)), held=holds("s0"))).moves == ()
    assert decide(sending(source, rank(queued=[sequence(20)], runs=running(1, first=10)), held=holds("s0"))).moves == ()


def test_a_prefill_moves_nothing_and_begins_no_copy():
    empty = rank(queued=[sequence(20, status=sequence(0).status)])
    decision = decide(sending(rank(runs=running(1, tokens=LONG)), empty, held=holds("s0")))
    assert decision.prefill
    assert (decision.moves, decision.copies) == ((), ())


def copies(*pages: int, source: int = 0, target: int = 1) -> list[EarlyCopy]:
    return [
        EarlyCopy(sequence_id=f"{source}{i}", source=source, target=target, full_pages=n, pages=n, gap=0)
        for i, n in enumerate(pages)
    ]


def test_few_pages_are_copied_to_a_rank_at_a_time_but_one_sequence_whole(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(early_copies, "MOST_PAGES", 10)
    assert [copy.full_pages for copy in within_limits(copies(4, 7, 6, 1))] == [4, 6]
    assert [copy.full_pages for copy in within_limits(copies(40, 1))] == [40]
    assert len(within_limits([*copies(8), *copies(8, target=2)])) == 2, "the limit is each rank's"


def test_between_two_ranks_copies_go_in_one_direction_at_a_time():
    """Over NCCL, both ranks begin the two directions in the same order only if there is one."""
    both = [*copies(1, 1), *copies(1, source=1, target=0)]
    assert {(copy.source, copy.target) for copy in within_limits(both)} == {(0, 1)}


def test_for_tests_all_sequences_move_at_once_or_all_with_a_full_page_are_prepared():
    ranks = sending(
        rank(runs=[*running(2, tokens=SIZE), movable(5, tokens=1)]), rank(runs=running(1, first=10, tokens=1))
    )
    always, prepared = decide(ranks, Migration.ALWAYS), decide(ranks, Migration.PREPARED)
    assert (len(always.moves), always.copies) == (4, ())
    assert copied(prepared) == [("s0", 0, 1), ("s1", 0, 1)]
    assert [move.sequence_id for move in prepared.moves] == ["s5", "s10"]


@pytest.mark.parametrize("migration", [Migration.EVEN, Migration.PREPARED])
def test_no_copy_is_made_of_a_sequence_of_several_ranks_or_to_a_rank_in_a_partition(migration: Migration):
    first, second = rank(runs=running(3, tokens=LONG)), rank(runs=running(1, first=10, tokens=LONG))
    ranks = sending(in_set(first, {0, 1}, 1), in_set(second, {0, 1}, 3), rank(runs=running(6, first=20, tokens=LONG)))
    decision = decide(ranks, migration)
    assert (decision.moves, decision.copies) == ((), ())


def test_ranks_are_partitioned_only_when_no_copy_is_under_way_to_them():
    ranks = sending(rank(runs=running(1, tokens=LONG)), rank(runs=running(1, first=10)), held=holds("s0"))
    assert refusal(whole_set(ranks, (0, 1)), ranks, PLAN) is None, "what has arrived is dropped first"
    ranks = sending(*ranks, held=holds("s0", arrived=False))
    assert refusal(whole_set(ranks, (0, 1)), ranks, PLAN) == (
        "copies of sequences that were to move are under way to rank 1"
    )


def test_a_sequence_of_which_a_copy_is_under_way_does_not_move_to_another_rank():
    ranks = sending(rank(runs=running(3, tokens=SIZE)), rank(), rank(), held=holds("s0", arrived=False))
    assert in_phases(ranks, [Move(sequence_id="s0", source=0, target=1)], PLAN, Migration.EVEN) == ((), ())


def test_a_move_that_a_callback_wants_is_prepared_and_made_when_it_wants_it_again():
    """Another boundary without that wish drops the copy."""

    def to_the_last(view: GroupView) -> Actions:
        return (Migrate(sequences=(view.ranks[0].running[0].sequence,), source=0, target=1),)

    callbacks = Callbacks(on_long_tail=to_the_last, names={"on_long_tail": "test"})
    runs = running(1, tokens=LONG, pages=12), running(1, first=10)
    ranks = sending(rank(runs=runs[0]), rank(runs=runs[1], free_pages=12))
    begun = decide_group(ranks, PLAN, Migration.EVEN, callbacks)
    assert (begun.fault, begun.moves, copied(begun)) == (None, (), [("s0", 0, 1)])
    assert not any(isinstance(action, Migrate) for action in begun.actions[0])
    there = sending(ranks[0], replace(ranks[1], free_pages=0), held=holds("s0"))
    followed = decide_group(there, PLAN, Migration.EVEN, callbacks)
    assert (followed.fault, followed.copies) == (None, ())
    assert followed.moves == (Move(sequence_id="s0", source=0, target=1, prepared=True),)


def test_a_rank_that_lacks_sequences_gets_first_those_of_which_it_holds_a_copy():
    waiting = [movable(i, tokens=LONG) for i in range(12)]
    prompt = rank(queued=[sequence(90)], runs=running(5, first=20))
    ranks = sending(rank(ready=waiting, runs=running(4, first=40)), prompt, held=holds("s9"))
    decision = decide(ranks)
    assert decision.moves == (Move(sequence_id="s9", source=0, target=1, prepared=True),)
