"""A rank's list of moves is checked before anything is offered. A boundary without moves of this rank does nothing."""

from __future__ import annotations

import pytest
from memory_wires import MemoryChannel, MemoryTransport
from page_store import PageStore

from sgl_batch.core.rank_moves import Move
from sgl_batch.distributed.rank_errors import PeerLost, PeerTimeout
from sgl_batch.migration.endpoints import Endpoints
from sgl_batch.migration.migrator import Migrator
from sgl_batch.migration.outcome import MigrationFailed, Outcome, Report, Result


def migrator(rank: int = 0) -> Migrator:
    ends = Endpoints(channel=MemoryChannel(rank), transport=MemoryTransport(), store=PageStore(4), step_timeout_s=1)
    return Migrator(ends)


def move(sequence_id: str, source: int, target: int) -> Move:
    return Move(sequence_id=sequence_id, source=source, target=target)


def test_moves_between_other_ranks_return_at_once():
    assert migrator(rank=2).run(0, [move("a", 0, 1), move("b", 1, 0)]) == Report(outcomes=())


@pytest.mark.parametrize(
    ("moves", "reason"),
    [
        ([move("a", 1, 1)], "sequence a moves from rank 1 to itself"),
        ([move("a", 0, 1), move("a", 2, 0)], "a sequence moves twice at boundary 4: .*'a', 'a'"),
    ],
)
def test_invalid_moves_are_a_fault(moves, reason):
    with pytest.raises(AssertionError, match=reason):
        migrator().run(4, moves)


def test_a_sequence_can_be_copied_to_several_ranks_but_to_each_once():
    ends = Endpoints(channel=MemoryChannel(2), transport=MemoryTransport(), store=PageStore(4), step_timeout_s=1)
    copies = Migrator(ends, copies=True)
    assert copies.run(0, [move("a", 0, 1), move("a", 0, 3)]) == Report(outcomes=())
    with pytest.raises(AssertionError, match="a sequence moves twice at boundary 1"):
        copies.run(1, [move("a", 0, 2), move("a", 0, 2)])


def test_boundary_numbers_rise():
    rank = migrator()
    rank.run(4, [])
    with pytest.raises(AssertionError, match="boundary 4 does not come after boundary 4"):
        rank.run(4, [])


def test_resume_and_peer_died_report_nothing_without_batches_in_doubt():
    assert migrator().resume() == migrator().peer_died(1) == Report(outcomes=())


def test_a_failure_names_the_failed_ranks_and_counts_the_outcomes():
    outcomes = [
        Outcome(sequence_id=name, peer=1, result=result)
        for name, result in [("a", Result.KEPT), ("b", Result.KEPT), ("c", Result.RELEASED)]
    ]
    lost = PeerLost(1, awaiting="Stored", seconds=0.5)
    late = PeerTimeout([2], awaiting="Accept", seconds=3)
    error = MigrationFailed(Report(outcomes=tuple(outcomes), failures=(lost, late, lost)))
    assert str(error) == (f"migration failed: {lost}; {late}. Sequences on this rank: 2 stayed here, 1 moved away")
    assert [outcome.owned_here for outcome in outcomes] == [True, True, False]
