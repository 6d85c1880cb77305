"""A group is combined only when every row has been put, once, in any order; and taken in calls of a limit."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_batch.core.plan import row_spans
from sgl_batch.model_executor.accumulation_buffer import AccumulationBuffer

# No deadline: a busy machine is no fault of the code.
QUICK = settings(max_examples=60, deadline=None)


def rows(seed: int, num_rows: int) -> torch.Tensor:
    return torch.randn(num_rows, 3, generator=torch.Generator().manual_seed(seed))


@QUICK
@given(st.integers(1, 50), st.integers(1, 60), st.integers(1, 60), st.integers(1, 3), st.randoms())
def test_a_group_holds_what_its_sub_batches_yielded_in_every_layer(
    num_rows: int, b_attn: int, limit: int, num_layers: int, order: random.Random
) -> None:
    buffer = AccumulationBuffer(num_rows)
    for layer in range(num_layers):
        hidden, residual = rows(layer, num_rows), rows(layer + 100, num_rows)
        spans = row_spans(num_rows, b_attn)
        order.shuffle(spans)
        for start, end in spans:
            assert buffer.ready() == 0
            buffer.put((start, end), hidden[start:end], residual[start:end])
        taken = []
        while buffer.ready():
            assert buffer.ready() == num_rows - (taken[-1][1] if taken else 0)
            (start, end), some, residuals = buffer.take(limit)
            assert torch.equal(some, hidden[start:end])
            assert torch.equal(residuals, residual[start:end])
            taken.append((start, end))
        assert taken == row_spans(num_rows, limit)


def test_a_sub_batch_that_is_the_group_passes_without_a_copy() -> None:
    hidden, residual = rows(0, 4), rows(1, 4)
    buffer = AccumulationBuffer(4)
    buffer.put((0, 4), hidden, residual)
    span, taken, kept = buffer.take(4)
    assert span == (0, 4)
    assert taken is hidden
    assert kept is residual


def test_the_residual_of_a_span_may_come_from_the_buffer_itself() -> None:
    buffer, hidden = AccumulationBuffer(4), rows(0, 4)
    for start, end in ((0, 2), (2, 4)):
        buffer.put((start, end), hidden[start:end], hidden[start:end])
    _, _, residual = buffer.take(4)
    for start, end in ((2, 4), (0, 2)):
        buffer.put((start, end), hidden[start:end], residual[start:end] + hidden[start:end])
    assert torch.equal(buffer.take(4)[2], 2 * hidden)


@pytest.mark.parametrize("span", [(0, 2), (1, 3), (1, 2), (0, 4)])
def test_a_span_that_overlaps_another_is_refused(span: tuple[int, int]) -> None:
    buffer, size = AccumulationBuffer(4), span[1] - span[0]
    buffer.put((0, 2), rows(0, 2), rows(0, 2))
    with pytest.raises(AssertionError, match=r"2 are written|is written already"):
        buffer.put(span, rows(0, size), rows(0, size))


def test_a_span_outside_of_the_group_is_refused() -> None:
    with pytest.raises(AssertionError, match=r"span \(3, 5\) is not of 4 rows"):
        AccumulationBuffer(4).put((3, 5), rows(0, 2), rows(0, 2))


def test_a_group_is_not_combined_while_rows_are_missing() -> None:
    buffer = AccumulationBuffer(4)
    buffer.put((0, 2), rows(0, 2), rows(0, 2))
    with pytest.raises(AssertionError, match="2 of 4 rows are written"):
        buffer.take(2)


def test_a_layer_does_not_begin_before_all_rows_of_the_last_are_taken() -> None:
    buffer = AccumulationBuffer(4)
    for span in ((0, 2), (2, 4)):
        buffer.put(span, rows(0, 2), rows(0, 2))
    buffer.take(3)
    with pytest.raises(AssertionError, match="1 rows of the layer before are not taken"):
        buffer.put((0, 2), rows(0, 2), rows(0, 2))
    buffer.take(3)
    with pytest.raises(AssertionError, match="0 of 4 rows are written"):
        buffer.take(1)
