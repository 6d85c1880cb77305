"""For which numbers of rows a decode step is captured, and when."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgl_batch.core.graph_capture import PASSES_BEFORE_CAPTURE, Captures, captured_rows, graph_budget

NO_LIMIT = 1 << 20
MOST = 32


@given(st.integers(1, 5000), st.integers(0, 5000))
def test_a_size_holds_the_rows_and_is_at_most_the_largest(num_rows: int, more: int) -> None:
    most = num_rows + more
    assert num_rows <= captured_rows(num_rows, most) <= most


@given(st.integers(1, 100_000))
def test_a_quarter_of_the_rows_is_padding_at_most(num_rows: int) -> None:
    assert captured_rows(num_rows, NO_LIMIT) < 1.25 * num_rows + 2


@given(st.integers(1, 100_000))
def test_a_size_is_its_own_size_so_that_rows_share_one(num_rows: int) -> None:
    size = captured_rows(num_rows, NO_LIMIT)
    assert captured_rows(size, NO_LIMIT) == size


def test_sizes_are_few() -> None:
    sizes = sorted({captured_rows(num_rows, 64) for num_rows in range(1, 65)})
    assert sizes == [1, 2, 4, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 56, 64]
    assert captured_rows(49, 50) == 50, "the largest group is captured without padding"


def sizes_for(captures: Captures, num_rows: int, times: int) -> list[int | None]:
    """Return the sizes at which `times` passes run; each size is captured at once."""
    sizes = []
    for _ in range(times):
        sizes.append(captures.size_for(num_rows, MOST))
        if sizes[-1] is not None:
            captures.add(sizes[-1], 10)
    return sizes


def test_a_size_is_captured_after_a_few_passes_and_the_largest_before_it() -> None:
    captures, eager = Captures(1000), [None] * (PASSES_BEFORE_CAPTURE - 1)
    assert sizes_for(captures, 9, PASSES_BEFORE_CAPTURE + 2) == [*eager, MOST, 10, 10]
    assert sizes_for(captures, 10, 1) == [10], "rows that round up to one size share it"
    assert sizes_for(captures, 21, PASSES_BEFORE_CAPTURE) == [*eager, 24], "each size counts for itself"
    assert sizes_for(captures, MOST, 1) == [MOST]


def test_a_full_budget_ends_captures_and_existing_ones_serve() -> None:
    captures = Captures(30)
    captures.spend(15)
    assert sizes_for(captures, 9, PASSES_BEFORE_CAPTURE + 1)[-2:] == [MOST, 10]
    assert sizes_for(captures, 21, 2 * PASSES_BEFORE_CAPTURE) == [None] * 2 * PASSES_BEFORE_CAPTURE
    assert sizes_for(captures, 9, 1) == [10]


def test_stopping_keeps_what_is_captured() -> None:
    captures = Captures(1000)
    sizes_for(captures, 9, PASSES_BEFORE_CAPTURE)
    captures.stop()
    assert sizes_for(captures, 9, 2) == [None, None]
    assert sizes_for(captures, MOST, 1) == [MOST]


def test_forgotten_captures_free_their_memory() -> None:
    captures = Captures(30)
    captures.spend(15)
    sizes_for(captures, 9, PASSES_BEFORE_CAPTURE + 1)
    assert captures.forget() == 20
    assert sizes_for(captures, 9, PASSES_BEFORE_CAPTURE) == [*[None] * (PASSES_BEFORE_CAPTURE - 1), MOST]
    assert captures.forget() == 10


def test_a_budget_of_nothing_captures_nothing() -> None:
    assert sizes_for(Captures(0), 9, 2 * PASSES_BEFORE_CAPTURE) == [None] * 2 * PASSES_BEFORE_CAPTURE


@pytest.mark.parametrize(
    "obstacle",
    [
        {"device_captures": False},
        {"metadata_on_device": False},
        {"num_ranks": 2},
        {"streamed_weights": True},
        {"reports_expert_choices": True},
        {"yields_to_user": True},
    ],
    ids=lambda obstacle: next(iter(obstacle)),
)
def test_each_obstacle_to_graphs_leaves_no_budget(obstacle: dict[str, int]) -> None:
    fit = {
        "device_captures": True,
        "metadata_on_device": True,
        "num_ranks": 1,
        "streamed_weights": False,
        "reports_expert_choices": False,
        "yields_to_user": False,
    }
    assert graph_budget(1000, **fit) == 1000
    assert graph_budget(0, **fit) == 0
    assert graph_budget(1000, **{**fit, **obstacle}) == 0


def test_more_rows_than_the_largest_size_are_a_fault() -> None:
    with pytest.raises(AssertionError, match="9 rows where 1 to 8"):
        captured_rows(9, 8)
