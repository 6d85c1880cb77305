"""Which shapes of a decode step's halves are captured, for how many rows, and until when."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgl_batch.core.graph_capture import MEETINGS, Captures, HalfShape, captured_rows, graph_budget, padded_shapes
from sgl_batch.core.plan import row_spans

NO_LIMIT = 1 << 20
SHAPE = HalfShape(half="experts", start=0, rows=8)


def met(captures: Captures, shape: HalfShape, times: int) -> list[bool]:
    return [captures.meet(shape) for _ in range(times)]


@given(st.integers(1, 5000), st.integers(0, 5000))
def test_a_size_holds_the_rows_and_no_more_than_may_be(num_rows: int, more: int) -> None:
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
    assert captured_rows(49, 50) == 50, "the largest group is captured as it is"


@given(st.integers(1, 300), st.integers(1, 100), st.integers(0, 40))
def test_shapes_cover_the_padded_rows_once_and_only_the_last_is_padded(num_rows: int, limit: int, more: int) -> None:
    spans, end = row_spans(num_rows, limit), 0
    for span, shape in zip(spans, padded_shapes("attention", spans, num_rows + more), strict=True):
        assert (shape.half, shape.start) == ("attention", span[0])
        assert shape.start == end
        assert span == spans[-1] or shape.rows == span[1] - span[0]
        end = shape.start + shape.rows
    assert end == num_rows + more


def test_a_shape_is_captured_when_it_has_been_met_a_few_times_and_from_then_on() -> None:
    captures = Captures(1000)
    assert met(captures, SHAPE, MEETINGS) == [False] * (MEETINGS - 1) + [True]
    captures.add(SHAPE, 10)
    assert captures.meet(SHAPE)
    other = HalfShape(half="attention", start=0, rows=8)
    assert not captures.meet(other), "each shape counts for itself"


def test_when_the_budget_is_full_nothing_more_is_captured_and_what_is_serves() -> None:
    captures = Captures(100)
    met(captures, SHAPE, MEETINGS)
    captures.add(SHAPE, 60)
    assert captures.goes_on
    captures.spend(40)
    assert not captures.goes_on
    assert captures.meet(SHAPE)
    assert met(captures, HalfShape(half="experts", start=0, rows=4), 2 * MEETINGS) == [False] * 2 * MEETINGS


def test_stopping_keeps_what_is_captured() -> None:
    captures = Captures(100)
    met(captures, SHAPE, MEETINGS)
    captures.add(SHAPE, 1)
    captures.stop()
    assert not captures.goes_on
    assert captures.meet(SHAPE)


def test_a_budget_of_nothing_captures_nothing() -> None:
    assert met(Captures(0), SHAPE, 2 * MEETINGS) == [False] * 2 * MEETINGS


@pytest.mark.parametrize(
    "hindrance",
    [{"device_captures": False}, {"num_ranks": 2}, {"streamed_weights": True}, {"choices_told": True}],
    ids=lambda hindrance: next(iter(hindrance)),
)
def test_what_no_graph_can_do_leaves_no_budget(hindrance: dict[str, int]) -> None:
    fit = {"device_captures": True, "num_ranks": 1, "streamed_weights": False, "choices_told": False}
    assert graph_budget(1000, **fit) == 1000
    assert graph_budget(0, **fit) == 0
    assert graph_budget(1000, **{**fit, **hindrance}) == 0


def test_more_rows_than_can_be_are_a_fault() -> None:
    with pytest.raises(AssertionError, match="9 rows where 1 to 8"):
        captured_rows(9, 8)
