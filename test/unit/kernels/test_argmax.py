"""The largest number of each row is found as torch finds it, whatever the rows' length, number type and place."""

from __future__ import annotations

import pytest
import sgl_batch_kernel
import torch


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("count", [1, 15, 1023, 1024, 1025, 5000])
def test_the_largest_number_of_each_row_is_found(dtype, count):
    rows = torch.randn(7, count + 3, generator=torch.Generator().manual_seed(count)).to(dtype)[:, :count]
    found = sgl_batch_kernel.argmax(rows)
    assert found.dtype == torch.int64
    assert rows.float().gather(1, found[:, None]).squeeze(1).tolist() == rows.float().amax(1).tolist()


def test_of_equal_numbers_the_first_is_taken_and_zeros_are_equal():
    rows = torch.full((3, 3000), -1.0)
    rows[0, [1100, 2000]] = 5.0
    rows[1, 7], rows[1, 2000] = -0.0, 0.0
    assert sgl_batch_kernel.argmax(rows).tolist() == [1100, 7, 0]


def test_nan_is_larger_than_infinity_and_minus_infinity_is_a_number():
    rows = torch.full((2, 2000), float("-inf"))
    rows[0, 3], rows[0, 1500] = float("inf"), float("nan")
    assert sgl_batch_kernel.argmax(rows).tolist() == [1500, 0]


@pytest.mark.parametrize(
    "rows", [torch.zeros(2, 0), torch.zeros(8, 2).T, torch.zeros(4)], ids=["empty", "strides", "1-d"]
)
def test_rows_that_do_not_fit_are_refused(rows):
    with pytest.raises(RuntimeError, match="rows are"):
        sgl_batch_kernel.argmax(rows)
