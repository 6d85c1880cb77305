"""Between real processes a sequence arrives byte for byte. A sequence without room stays where it was."""

from __future__ import annotations

import pytest
from moving_processes import RankPlan, RankProcess, rank_processes, run_all

from sgl_batch.core.rank_moves import Move
from sgl_batch.migration.outcome import Result


def everything(ranks: list[RankProcess]):
    """Return the sequences of each rank."""
    for process in ranks:
        process.ask("hold")
    return [process.answer().held for process in ranks]


def moves_of(*plans: tuple[int, int, list[str]]) -> list[Move]:
    return [Move(sequence_id=name, source=source, target=target) for source, target, names in plans for name in names]


def results(answer) -> dict[str, Result]:
    return {name: outcome.result for name, outcome in answer.outcomes.items()}


def test_header_and_kv_are_the_same_after_a_move_and_after_the_move_back(tmp_path):
    with rank_processes(tmp_path, RankPlan(sequences={"a": 3, "b": 1}), RankPlan(sequences={"c": 2})) as ranks:
        before = everything(ranks)
        first, second = run_all(ranks, 0, moves_of((0, 1, ["a"])))
        assert results(first) == {"a": Result.RELEASED}
        assert results(second) == {"a": Result.ADOPTED}
        assert first.held == {"b": before[0]["b"]}
        assert second.held == {"a": before[0]["a"], "c": before[1]["c"]}
        first, second = run_all(ranks, 1, moves_of((1, 0, ["a"])))
        assert [first.held, second.held] == before


def test_both_directions_move_at_once_and_a_boundary_without_moves_reports_nothing(tmp_path):
    here, there = [f"h{n}" for n in range(5)], [f"t{n}" for n in range(7)]
    plans = [RankPlan(sequences=dict.fromkeys(here, 2)), RankPlan(sequences=dict.fromkeys(there, 3))]
    with rank_processes(tmp_path, *plans) as ranks:
        before = everything(ranks)
        first, second = run_all(ranks, 3, moves_of((1, 0, there), (0, 1, here)))
        assert [second.held, first.held] == before
        assert (first.error, second.error) == (None, None)
        assert [answer.outcomes for answer in run_all(ranks, 4, [])] == [{}, {}]


def test_between_two_ranks_the_kv_of_the_lower_one_goes_first_and_alone(tmp_path):
    here, there = [f"h{n}" for n in range(5)], [f"t{n}" for n in range(5)]
    plans = [
        RankPlan(sequences=dict.fromkeys(names, 3), page_shape=(2, 64, 64), longest_delay_s=0.02)
        for names in (here, there)
    ]
    with rank_processes(tmp_path, *plans) as ranks:
        first, second = run_all(ranks, 0, moves_of((1, 0, there), (0, 1, here)))
        assert first.transfers == [("send", True), ("recv", True)]
        assert second.transfers == [("recv", True), ("send", True)]


@pytest.mark.parametrize("longest_delay_s", [0.0, 0.02])
def test_a_hundred_sequences_cross_between_three_ranks_whatever_is_delayed(tmp_path, longest_delay_s):
    names = [f"s{number}" for number in range(100)]
    homes = {name: number % 3 for number, name in enumerate(names)}
    plans = [
        RankPlan(
            sequences={name: int(name[1:]) % 4 for name in names if homes[name] == rank},
            num_pages=200,
            longest_delay_s=longest_delay_s,
        )
        for rank in range(3)
    ]
    with rank_processes(tmp_path, *plans) as ranks:
        fingerprints = {name: held for store in everything(ranks) for name, held in store.items()}
        for boundary in range(3):
            moves = []
            for number, name in enumerate(names):
                target = (homes[name] + 1 + (number + boundary) % 2) % 3
                moves.append(Move(sequence_id=name, source=homes[name], target=target))
                homes[name] = target
            answers = run_all(ranks, boundary, moves)
            assert [answer.error for answer in answers] == [None] * 3
            for rank, answer in enumerate(answers):
                assert answer.held == {name: fingerprints[name] for name in names if homes[name] == rank}


def test_a_sequence_without_room_stays_with_its_sender_and_the_others_move(tmp_path):
    plans = [RankPlan(sequences={"a": 2, "big": 5, "b": 1}), RankPlan(num_pages=4)]
    with rank_processes(tmp_path, *plans) as ranks:
        before = everything(ranks)[0]
        first, second = run_all(ranks, 0, moves_of((0, 1, ["a", "big", "b"])))
        assert results(first) == {"a": Result.RELEASED, "big": Result.KEPT, "b": Result.RELEASED}
        assert results(second) == {"a": Result.ADOPTED, "big": Result.NOT_ADOPTED, "b": Result.ADOPTED}
        assert first.outcomes["big"].reason == second.outcomes["big"].reason == "5 pages are needed, 2 are free"
        assert first.held == {"big": before["big"]}
        assert second.held == {name: before[name] for name in ("a", "b")}
        first, second = run_all(ranks, 1, moves_of((0, 1, ["big"])))  # nothing fits: refused as a whole
        assert results(first) == {"big": Result.KEPT}
        assert (first.error, second.error) == (None, None)


def test_ranks_with_different_layouts_refuse_each_others_sequences(tmp_path):
    plans = [RankPlan(sequences={"a": 2}), RankPlan(page_shape=(2, 4, 4))]
    with rank_processes(tmp_path, *plans) as ranks:
        first, _ = run_all(ranks, 0, moves_of((0, 1, ["a"])))
        assert results(first) == {"a": Result.KEPT}
        assert "ranks that exchange sequences need the same model, page size" in first.outcomes["a"].reason


def test_ranks_that_have_decided_different_moves_report_it_and_nothing_moves(tmp_path):
    with rank_processes(tmp_path, RankPlan(sequences={"a": 2, "b": 1}), RankPlan()) as ranks:
        before = everything(ranks)
        ranks[0].ask("run", 0, moves_of((0, 1, ["a"])))
        ranks[1].ask("run", 0, moves_of((0, 1, ["b"])))
        first, second = [process.answer() for process in ranks]
        assert [first.held, second.held] == before
        assert "rank 1 gave up" in first.error
        assert "the ranks have not decided the same moves" in second.error


def test_a_rank_that_is_late_for_a_boundary_finds_its_offers(tmp_path):
    plans = [RankPlan(sequences={"a": 2}), RankPlan(sequences={"b": 2}), RankPlan()]
    with rank_processes(tmp_path, *plans) as ranks:
        ranks[0].ask("run", 0, moves_of((0, 1, ["a"])))
        ranks[1].ask("run", 0, moves_of((0, 1, ["a"])))
        ranks[1].answer()
        ranks[1].ask("run", 1, moves_of((1, 2, ["b"])))  # rank 2 has not even seen the boundary before
        ranks[2].ask("run", 0, moves_of((0, 1, ["a"])))
        assert ranks[2].answer().outcomes == {}
        ranks[2].ask("run", 1, moves_of((1, 2, ["b"])))
        assert results(ranks[2].answer()) == {"b": Result.ADOPTED}
        assert results(ranks[1].answer()) == {"b": Result.RELEASED}
        assert results(ranks[0].answer()) == {"a": Result.RELEASED}
