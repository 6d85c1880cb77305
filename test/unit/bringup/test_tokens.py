"""Tokens agree with a reference if they are equal or differ only after a near tie."""

from __future__ import annotations

from pathlib import Path

import pytest

from bringup.tokens import Reference, compare

# Step 2 of the first sequence nearly ties between 5 and 6; 7 is far behind, 8 is not among the best.
BEST = [[(1, -0.1), (9, -3.0)], [(2, -0.1), (9, -3.0)], [(5, -0.7), (6, -0.9), (7, -2.0)], [(4, 0.0), (9, -9.0)]]
REFERENCE = Reference([[1, 2, 5, 4], [3, 3]], [BEST, [[(3, 0.0), (9, -9.0)]] * 2])


def test_equal_tokens_agree() -> None:
    found = compare([[1, 2, 5, 4], [3, 3]], REFERENCE)
    assert found.holds
    assert found.text() == "6 of 6"


def test_what_follows_a_near_tie_is_not_compared() -> None:
    found = compare([[1, 2, 6, 8], [3, 3]], REFERENCE)
    assert found.holds
    assert found.text() == "4 of 6, 1 near ties (gap 0.20)"


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ([[1, 2, 7, 4], [3, 3]], "has token 7 at 2 instead of 5, whose logit is 1.30 lower"),
        ([[1, 2, 8, 4], [3, 3]], "which is not among the 5 best"),
        ([[1, 2, 5, 4], [3]], "sequence 1 has 1 tokens instead of 2"),
    ],
)
def test_any_other_difference_is_reported(tokens: list[list[int]], message: str) -> None:
    found = compare(tokens, REFERENCE)
    assert not found.holds
    assert message in found.why_not


def test_tokens_of_which_most_follow_near_ties_tell_nothing() -> None:
    near = Reference([[1, 2, 5, 4]], [[[(1, -0.70), (9, -0.72)], *BEST[1:]]])
    found = compare([[9, 2, 5, 4]], near)
    assert found.differences == []
    assert not found.holds
    assert found.why_not.startswith("only 0 of 4 tokens come before a near tie")


def test_a_reference_is_read_as_it_was_written(tmp_path: Path) -> None:
    REFERENCE.write(tmp_path / "reference.json")
    assert Reference.read(tmp_path / "reference.json") == REFERENCE
