"""Rows of any width lie aligned in bytes, and their memory is kept from one exchange to the next."""

from __future__ import annotations

import pytest
import torch

from sgl_batch.layers.moe.token_dispatcher.packed_rows import GrowingBuffer, RowFormat

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("hidden_size", "top_k"), [(1, 1), (13, 3), (1024, 8)])
def test_parts_are_aligned_and_do_not_overlap(hidden_size: int, top_k: int, dtype: torch.dtype) -> None:
    row_format = RowFormat(hidden_size=hidden_size, top_k=top_k, dtype=dtype)
    rows_RB = GrowingBuffer(CPU).rows(5, row_format.row_bytes)
    x_RM, ids_RK, weights_RK = row_format.parts(rows_RB)
    assert (row_format.ids_start % 16, row_format.row_bytes % 16) == (0, 0)
    ids_RK.fill_(7)
    weights_RK.fill_(0.5)
    x_RM.fill_(-3)
    assert x_RM.shape == (5, hidden_size)
    assert (x_RM.unique().tolist(), ids_RK.unique().tolist(), weights_RK.unique().tolist()) == ([-3.0], [7], [0.5])


def test_memory_is_reused_until_more_is_needed() -> None:
    buffer = GrowingBuffer(CPU)
    first = buffer.rows(10, 32)
    assert buffer.rows(3, 64).data_ptr() == first.data_ptr()
    assert buffer.rows(10, 32).data_ptr() == first.data_ptr()
    assert buffer.rows(11, 32).shape == (11, 32)


def test_growth_leaves_room_so_that_slowly_rising_sizes_seldom_allocate() -> None:
    buffer = GrowingBuffer(CPU)
    grown = buffer.rows(100, 32), buffer.rows(101, 32)
    assert buffer.rows(150, 32).data_ptr() == grown[1].data_ptr()
