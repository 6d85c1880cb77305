"""A group is combined only when every row has been written, once, in order."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_batch.core.plan import row_spans
from sgl_batch.model_executor.accumulation_buffer import AccumulationBuffer

# No deadline: a busy machine is no fault of the code.
QUICK = settings(max_examples=60, deadline=None)


def make(num_rows: int) -> AccumulationBuffer:
    return AccumulationBuffer(num_rows, 3, torch.float32, torch.device("cpu"))


def rows(seed: int, num_rows: int) -> torch.Tensor:
    return torch.randn(num_rows, 3, generator=torch.Generator().manual_seed(seed))


@QUICK
@given(st.integers(1, 50), st.integers(1, 60), st.integers(1, 3))
def test_a_group_holds_what_its_sub_batches_yielded_in_every_layer(num_rows, b_attn, num_layers):
    buffer = make(num_rows)
    for layer in range(num_layers):
        hidden, residual = rows(layer, num_rows), rows(layer + 100, num_rows)
        for start, end in row_spans(num_rows, b_attn):
            buffer.write((start, end), hidden[start:end], residual[start:end])
        combined = buffer.combined()
        assert torch.equal(combined[0], hidden)
        assert torch.equal(combined[1], residual)


def test_the_residual_of_a_span_may_come_from_the_buffer_itself():
    buffer, hidden = make(4), rows(0, 4)
    buffer.write((0, 4), hidden, hidden)
    _, residual = buffer.combined()
    for start, end in ((0, 2), (2, 4)):
        buffer.write((start, end), hidden[start:end], residual[start:end] + hidden[start:end])
    assert torch.equal(buffer.combined()[1], 2 * hidden)


@pytest.mark.parametrize("span", [(0, 2), (1, 3), (3, 4)])
def test_a_span_that_does_not_follow_the_last_is_refused(span):
    buffer = make(4)
    buffer.write((0, 2), rows(0, 2), rows(0, 2))
    size = span[1] - span[0]
    with pytest.raises(AssertionError, match=f"span starts at row {span[0]}, but 2 rows are written"):
        buffer.write(span, rows(0, size), rows(0, size))


def test_a_group_is_not_combined_while_rows_are_missing():
    buffer = make(4)
    buffer.write((0, 2), rows(0, 2), rows(0, 2))
    with pytest.raises(AssertionError, match="2 of 4 rows are written"):
        buffer.combined()


def test_a_layer_does_not_combine_the_rows_of_the_one_before():
    buffer = make(2)
    buffer.write((0, 2), rows(0, 2), rows(0, 2))
    buffer.combined()
    with pytest.raises(AssertionError, match="0 of 2 rows are written"):
        buffer.combined()
