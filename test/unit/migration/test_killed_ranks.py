"""Wherever a side is killed, the survivor owns what the protocol's table says, and names the dead rank."""

from __future__ import annotations

import signal
import time

import pytest
from injected_faults import FIRST_CHUNK
from moving_processes import Answer, RankPlan, rank_processes
from page_store import PAGE_SHAPE

from sgl_batch.core.rank_moves import Move
from sgl_batch.migration.outcome import Result

NAMES = ["a", "b", "c"]
MOVES = [Move(sequence_id=name, source=0, target=1) for name in NAMES]
STEP_TIMEOUT_S = 20.0
# Pages of 256 KiB in 3 layers, keys and values: the 24 of the three sequences are five chunks of the transport.
LARGE = (2, 512, 128)
OWNED = {Result.KEPT, Result.RECLAIMED, Result.ADOPTED}


def two_plans(point: str) -> list[RankPlan]:
    """Rank 0 has the sequences. They are large where the point lies within the transfer of their KV."""
    shape = LARGE if point == FIRST_CHUNK else PAGE_SHAPE
    return [
        RankPlan(sequences=sequences, num_pages=24, page_shape=shape, step_timeout_s=STEP_TIMEOUT_S)
        for sequences in (dict.fromkeys(NAMES, 8), {})
    ]


def check_survivor(answer: Answer, allowed: set[Result], dead: int, before: dict) -> None:
    """Check that the table allows its view, its sequences are unharmed, and it noticed within the timeout."""
    ends = {outcome.result for outcome in answer.outcomes.values()}
    assert len(ends) == 1
    assert ends <= allowed
    assert answer.held == (before if ends <= OWNED else {})
    assert answer.seconds < STEP_TIMEOUT_S
    if answer.error is not None:
        assert f"rank {dead}" in answer.error
    else:
        assert ends <= {Result.ADOPTED, Result.RELEASED}


@pytest.mark.parametrize(
    ("point", "allowed"),
    [
        ("before sending Offer", {Result.NOT_ADOPTED}),
        ("after sending Offer", {Result.NOT_ADOPTED}),
        ("on Accept", {Result.NOT_ADOPTED}),
        (FIRST_CHUNK, {Result.NOT_ADOPTED}),
        ("on Stored", {Result.NOT_ADOPTED}),
        ("before sending Commit", {Result.NOT_ADOPTED}),
        ("after sending Commit", {Result.NOT_ADOPTED, Result.ADOPTED}),  # Commit may be lost with the sender
        ("on Committed", {Result.ADOPTED}),
        ("before release", {Result.ADOPTED}),
        ("after release", {Result.ADOPTED}),
    ],
)
def test_a_killed_sender_owns_the_sequences_that_it_had_not_committed(tmp_path, point, allowed):
    plans = two_plans(point)
    plans[0].dies_at = point
    with rank_processes(tmp_path, *plans) as ranks:
        ranks[0].ask("hold")
        before = ranks[0].answer().held
        for process in ranks:
            process.ask("run", 0, MOVES)
        check_survivor(ranks[1].answer(), allowed, 0, before)
        ranks[0].wait_for_death()


@pytest.mark.parametrize(
    ("point", "allowed"),
    [
        ("on Offer", {Result.KEPT}),
        ("before reserve", {Result.KEPT}),
        ("before sending Accept", {Result.KEPT}),
        ("after sending Accept", {Result.KEPT}),
        (FIRST_CHUNK, {Result.KEPT}),
        ("before sending Stored", {Result.KEPT}),
        ("after sending Stored", {Result.KEPT, Result.RECLAIMED}),  # Stored may be lost with the receiver
        ("on Commit", {Result.RECLAIMED}),
        ("before adopt", {Result.RECLAIMED}),
        ("after adopt", {Result.RECLAIMED}),
        ("before sending Committed", {Result.RECLAIMED}),
        ("after sending Committed", {Result.RECLAIMED, Result.RELEASED}),
    ],
)
def test_the_sender_keeps_the_sequences_that_a_killed_receiver_had_not_confirmed(tmp_path, point, allowed):
    plans = two_plans(point)
    plans[1].dies_at = point
    with rank_processes(tmp_path, *plans) as ranks:
        ranks[0].ask("hold")
        before = ranks[0].answer().held
        for process in ranks:
            process.ask("run", 0, MOVES)
        check_survivor(ranks[0].answer(), allowed, 1, before)
        ranks[1].wait_for_death()


@pytest.mark.parametrize(
    "point", ["before sending Offer", "on Accept", FIRST_CHUNK, "before sending Stored", "on Commit"]
)
def test_the_death_of_a_rank_does_not_affect_moves_between_others(tmp_path, point):
    plans = [
        RankPlan(sequences={f"from{rank}to{target}": 4 for target in range(3) if target != rank}) for rank in range(2)
    ]
    plans.append(RankPlan(sequences={"from2to0": 4, "from2to1": 4}, dies_at=point))
    moves = [
        Move(sequence_id=f"from{source}to{target}", source=source, target=target)
        for source in range(3)
        for target in range(3)
        if source != target
    ]
    with rank_processes(tmp_path, *plans) as ranks:
        for process in ranks:
            process.ask("run", 0, moves)
        first, second = ranks[0].answer(), ranks[1].answer()
        ranks[2].wait_for_death()
    for answer, own, other in ((first, 0, 1), (second, 1, 0)):
        assert answer.outcomes[f"from{own}to{other}"].result is Result.RELEASED
        assert answer.outcomes[f"from{other}to{own}"].result is Result.ADOPTED
        assert answer.outcomes[f"from{own}to2"].owned_here == (f"from{own}to2" in answer.held)
        assert answer.outcomes[f"from2to{own}"].owned_here == (f"from2to{own}" in answer.held)
        assert "rank 2" in answer.error
        assert f"rank {other}" not in answer.error.partition("Sequences on this rank")[0]


@pytest.mark.parametrize(
    ("stopped", "point", "resolved"),
    [
        (0, "before sending Commit", Result.NOT_ADOPTED),
        (1, "on Commit", Result.RECLAIMED),
    ],
)
def test_doubt_about_a_hung_rank_ends_with_its_death(tmp_path, stopped, point, resolved):
    plans = [RankPlan(sequences=dict.fromkeys(NAMES, 2), step_timeout_s=0.5), RankPlan(step_timeout_s=0.5)]
    plans[stopped].dies_at, plans[stopped].signal_number = point, signal.SIGSTOP
    with rank_processes(tmp_path, *plans) as ranks:
        survivor = ranks[1 - stopped]
        ranks[0].ask("hold")
        before = ranks[0].answer().held
        for process in ranks:
            process.ask("run", 0, MOVES)
        answer = survivor.answer()
        assert {outcome.result for outcome in answer.outcomes.values()} == {Result.IN_DOUBT}
        assert f"rank {stopped}: waited 0.5 s for Commit" in answer.error
        ranks[stopped].signal(signal.SIGKILL)
        ranks[stopped].wait_for_death()
        survivor.ask("peer_died", stopped)
        answer = survivor.answer()
        assert {outcome.result for outcome in answer.outcomes.values()} == {resolved}
        assert answer.held == (before if resolved is Result.RECLAIMED else {})


@pytest.mark.parametrize(("stopped", "point"), [(0, "before sending Commit"), (1, "on Commit")])
def test_the_messages_of_a_rank_that_wakes_again_resolve_doubt(tmp_path, stopped, point):
    plans = [RankPlan(sequences=dict.fromkeys(NAMES, 2)), RankPlan()]
    plans[stopped].dies_at, plans[stopped].signal_number = point, signal.SIGSTOP
    plans[1 - stopped].step_timeout_s = 0.5
    with rank_processes(tmp_path, *plans) as ranks:
        survivor = ranks[1 - stopped]
        for process in ranks:
            process.ask("run", 0, MOVES)
        assert survivor.answer().error is not None
        ranks[stopped].signal(signal.SIGCONT)
        ranks[stopped].answer() if stopped == 1 else None
        survivor.ask("resume")
        answer = survivor.answer()
        assert answer.error is None
        expected = Result.ADOPTED if stopped == 0 else Result.RELEASED
        assert {outcome.result for outcome in answer.outcomes.values()} == {expected}


def test_a_sender_keeps_its_sequences_where_the_receiver_is_late_for_the_boundary(tmp_path):
    plans = [RankPlan(sequences=dict.fromkeys(NAMES, 2), step_timeout_s=0.3), RankPlan()]
    with rank_processes(tmp_path, *plans) as ranks:
        ranks[0].ask("hold")
        before = ranks[0].answer().held
        ranks[0].ask("run", 0, MOVES)
        begun = time.monotonic()
        answer = ranks[0].answer()
        assert time.monotonic() - begun < STEP_TIMEOUT_S
        assert (
            "rank 1: waited 0.3 s for Accept or Refuse for the batch of boundary 0 from rank 0 to rank 1"
            in answer.error
        )
        assert {outcome.result for outcome in answer.outcomes.values()} == {Result.KEPT}
        ranks[1].ask("run", 0, MOVES)
        late = ranks[1].answer()
        assert {outcome.result for outcome in late.outcomes.values()} == {Result.NOT_ADOPTED}
        assert "rank 0 gave up the batch of boundary 0" in late.error
        assert (answer.held, late.held) == (before, {})
