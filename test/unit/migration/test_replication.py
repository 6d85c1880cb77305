"""A sequence that is copied to other ranks has one owner, its sender, wherever a rank is killed or refuses it."""

from __future__ import annotations

import pytest
from injected_faults import FIRST_CHUNK
from moving_processes import RankPlan, rank_processes, run_all
from page_store import PAGE_SHAPE

from sgl_batch.core.rank_moves import Move
from sgl_batch.migration.outcome import Result

NAMES = ["a", "b"]
COPIES = [Move(sequence_id=name, source=0, target=target) for name in NAMES for target in (1, 2)]
# Pages of 256 KiB in 3 layers, keys and values: those of a sequence are more than one chunk of the transport.
LARGE = (2, 512, 128)


def three_plans(page_shape: tuple[int, ...] = PAGE_SHAPE, **settings: int) -> list[RankPlan]:
    """Return plans of three ranks, of which rank 0 has the sequences."""
    plans = [RankPlan(copies=True, num_pages=24, page_shape=page_shape, step_timeout_s=20.0) for _ in range(3)]
    plans[0].sequences = dict.fromkeys(NAMES, 8)
    for name, number in settings.items():
        setattr(plans[2], name, number)
    return plans


def test_every_other_rank_gets_a_whole_replica_and_the_owner_keeps_the_sequence(tmp_path):
    with rank_processes(tmp_path, *three_plans()) as ranks:
        ranks[0].ask("hold")
        before = ranks[0].answer().held
        answers = run_all(ranks, 0, COPIES)
        assert [answer.held for answer in answers] == [before] * 3
        assert [answer.replicas for answer in answers] == [set(), set(NAMES), set(NAMES)]


def test_an_owner_learns_of_a_rank_that_has_no_room_and_the_others_have_their_replicas(tmp_path):
    with rank_processes(tmp_path, *three_plans(num_pages=12)) as ranks:
        owner, full, short = run_all(ranks, 0, COPIES)
    assert (owner.replicas, full.replicas, short.replicas) == (set(), set(NAMES), {"a"})
    assert short.outcomes["b"].result is Result.NOT_ADOPTED
    assert owner.held.keys() == set(NAMES)
    assert owner.outcomes["b"].result is Result.KEPT


@pytest.mark.parametrize(
    "point",
    ["on Offer", "before reserve", FIRST_CHUNK, "before sending Stored", "on Commit", "after adopt"],
)
def test_the_owner_keeps_its_sequences_when_a_rank_is_killed_that_gets_replicas(tmp_path, point):
    plans = three_plans(LARGE if point == FIRST_CHUNK else PAGE_SHAPE)
    plans[1].dies_at = point
    with rank_processes(tmp_path, *plans) as ranks:
        ranks[0].ask("hold")
        before = ranks[0].answer().held
        for process in ranks:
            process.ask("run", 0, COPIES)
        owner, other = ranks[0].answer(), ranks[2].answer()
        ranks[1].wait_for_death()
    assert (owner.held, owner.replicas) == (before, set())
    assert "rank 1" in owner.error
    assert (other.held, other.replicas) == (before, set(NAMES))


@pytest.mark.parametrize("point", ["after sending Offer", FIRST_CHUNK, "before sending Commit", "before release"])
def test_other_ranks_own_nothing_when_the_owner_is_killed(tmp_path, point):
    plans = three_plans(LARGE if point == FIRST_CHUNK else PAGE_SHAPE)
    plans[0].dies_at = point
    with rank_processes(tmp_path, *plans) as ranks:
        for process in ranks:
            process.ask("run", 0, COPIES)
        others = [process.answer() for process in ranks[1:]]
        ranks[0].wait_for_death()
    for other in others:
        assert other.held.keys() == other.replicas, "all that is here is a replica"
        assert other.replicas in (set(), set(NAMES))
