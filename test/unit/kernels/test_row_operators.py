"""The small operators on rows have torch's bits, also for the first rows of a record."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import sgl_batch_kernel as kernels
import torch

ROWS, WIDTH = 6, 40
TYPES = [torch.float32, torch.bfloat16]


def operands(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    made = torch.Generator().manual_seed(0)
    wide = torch.randn(ROWS, 2 * WIDTH, generator=made).to(dtype)
    return {
        "rows": torch.randn(ROWS, WIDTH, generator=made).to(dtype),
        "part": wide[:, 3 : 3 + WIDTH],
        "floats": torch.randn(ROWS, WIDTH, generator=made),
        "gate": torch.randn(ROWS, 1, generator=made).to(dtype),
        "weight": torch.randn(WIDTH, generator=made).to(dtype),
        "heads": torch.randn(ROWS, 5, 8, generator=made).to(dtype),
    }


def put(x: torch.Tensor) -> torch.Tensor:
    """Copy rows to a part of wider ones, as floats; return the wider ones."""
    wide = torch.full((ROWS, x.shape[1] + 6), 7.0)
    kernels.put_rows_(wide[:, 2:-4], x)
    return wide


def put_plainly(x: torch.Tensor) -> torch.Tensor:
    wide = torch.full((ROWS, x.shape[1] + 6), 7.0)
    wide[:, 2:-4] = x
    return wide


Compute = Callable[[dict[str, torch.Tensor]], torch.Tensor]
CASES: dict[str, tuple[Compute, Compute]] = {
    "copy": (lambda x: kernels.copy_rows(x["part"]), lambda x: x["part"].contiguous()),
    "copy of heads": (lambda x: kernels.copy_rows(x["heads"]), lambda x: x["heads"].clone()),
    "convert": (lambda x: kernels.copy_rows(x["floats"], torch.bfloat16), lambda x: x["floats"].bfloat16()),
    "put": (lambda x: put(x["part"]), lambda x: put_plainly(x["part"])),
    "add": (lambda x: kernels.add_rows(x["rows"], x["part"]), lambda x: x["rows"] + x["part"]),
    "add to floats": (lambda x: kernels.add_rows(x["floats"], x["rows"]), lambda x: x["floats"] + x["rows"]),
    "add a bias": (lambda x: kernels.add_rows(x["rows"], x["weight"]), lambda x: x["rows"] + x["weight"]),
    "multiply": (lambda x: kernels.mul_rows(x["gate"], x["part"]), lambda x: x["gate"] * x["part"]),
    "scale": (lambda x: kernels.scale_rows(x["rows"], 2.827), lambda x: x["rows"] * 2.827),
    "sigmoid": (lambda x: kernels.sigmoid_rows(x["part"]), lambda x: torch.sigmoid(x["part"])),
}


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_row_operators_have_torchs_bits(case: str, dtype: torch.dtype) -> None:
    native, plain = CASES[case]
    found, expected = native(operands(dtype)), plain(operands(dtype))
    assert (found.dtype, found.shape, found.is_contiguous()) == (expected.dtype, expected.shape, True)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_a_record_computes_the_first_rows_again_of_what_its_operands_hold_by_then(
    case: str, dtype: torch.dtype
) -> None:
    native, plain = CASES[case]
    given = operands(dtype)
    kernels.record_begin(ROWS)
    found = native(given)
    number = kernels.record_end(keep=True)
    assert number is not None
    before = found.clone()
    for one in given.values():
        one.mul_(-1.5)
    kernels.record_run(number, 4)
    kernels.record_drop(number)
    assert torch.equal(found[:4], plain(given)[:4])
    assert torch.equal(found[4:], before[4:])


def test_row_operators_refuse_what_has_no_rows() -> None:
    with pytest.raises(RuntimeError, match="takes rows; its operands have no dimensions"):
        kernels.copy_rows(torch.tensor(1.0))
    with pytest.raises(RuntimeError, match="x is Int; use floats"):
        kernels.sigmoid_rows(torch.ones(2, 3, dtype=torch.int32))
    with pytest.raises(RuntimeError, match=r"x is \[2, 3\] and goes to \[2, 4\]"):
        kernels.put_rows_(torch.zeros(2, 4), torch.zeros(2, 3))
