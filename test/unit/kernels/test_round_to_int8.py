"""Weights are rounded to int8 output by output: to nearest, by a scale that makes the largest 127."""

from __future__ import annotations

import pytest
import torch
from int8_reference import rounded_rows
from sgl_batch_kernel import pack_, pack_quads_, round_to_int8_, unpack_, unpack_quads_


def rounded(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    whole, scales = torch.full(weight.shape, 7, dtype=torch.int8), torch.full(weight.shape[:2], 7.0)
    round_to_int8_(weight, whole, scales)
    return whole, scales


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", [(3, 5, 1), (1, 33, 31), (2, 64, 32), (4, 70, 300)])
def test_it_is_what_rows_are_rounded_to_by_definition(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    weight = torch.randn(shape).to(dtype)
    weight[0, 0] = 0
    weight[-1, -1] *= 1e-30
    expected, scales = rounded_rows(weight)
    found = rounded(weight)
    assert torch.equal(found[0].double(), expected)
    assert torch.equal(found[1], scales[..., 0])


def test_halves_go_to_the_even_number() -> None:
    whole, scales = rounded(torch.tensor([[[127.0, 0.5, 1.5, -0.5, -2.5, 126.5]]]))
    assert whole.tolist() == [[[127, 0, 2, 0, -2, 126]]]
    assert scales.tolist() == [[1.0]]


@pytest.mark.parametrize("most", [127, 128])
@pytest.mark.parametrize("k", [32, 96, 128, 300, 2048])
def test_a_checkpoints_own_integers_are_found_with_a_scale_that_gives_its_numbers(k: int, most: int) -> None:
    """Rounded by the scale of the largest number, which is itself rounded, some would become their neighbours."""
    integers = torch.randint(-127, 128, (3, 64, k))
    integers[..., k // 2] = -most
    scales = torch.rand(3, 64, 1) / 100 + 1e-3
    numbers = (integers * scales).bfloat16()
    whole, found = rounded(numbers)
    assert torch.equal((whole * found.unsqueeze(-1)).bfloat16(), numbers)
    by_largest, _ = rounded_rows(numbers)
    assert not torch.equal(by_largest, integers.double())
    if k > 1000:  # few numbers can be those of other integers, too
        assert torch.equal(whole, integers.to(torch.int8))


@pytest.mark.parametrize("spoiled", [float("nan"), float("inf"), -float("inf")])
def test_an_output_with_a_number_that_is_not_finite_stays_so(spoiled: float) -> None:
    weight = torch.randn(1, 2, 40)
    weight[0, 1, 33] = spoiled
    whole, scales = rounded(weight)
    assert scales[0].isfinite().tolist() == [True, False]
    assert not (whole[0, 1].float() * scales[0, 1]).isfinite().any()


@pytest.mark.parametrize("k", [2, 62, 64, 128, 130, 260])
@pytest.mark.parametrize("n", [1, 32, 64, 77])
def test_packing_int8_is_undone(n: int, k: int) -> None:
    weight = torch.randint(-127, 128, (3, n, k), dtype=torch.int8)
    for pack, unpack in ((pack_, unpack_), (pack_quads_, unpack_quads_)):
        packed = weight.clone()
        pack(packed)
        assert n == 1 or k <= 4 or not torch.equal(packed, weight)
        unpack(packed)
        assert torch.equal(packed, weight)


@pytest.mark.parametrize(
    ("whole", "scales", "message"),
    [
        (torch.zeros(1, 2, 5, dtype=torch.int8), torch.zeros(1, 2), r"use contiguous int8 \[1, 2, 4\]"),
        (torch.zeros(1, 2, 4), torch.zeros(1, 2), r"use contiguous int8 \[1, 2, 4\]"),
        (torch.zeros(1, 2, 4, dtype=torch.int8), torch.zeros(1, 3), "one for each of 2 outputs"),
    ],
)
def test_room_that_does_not_fit_is_refused(whole: torch.Tensor, scales: torch.Tensor, message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        round_to_int8_(torch.zeros(1, 2, 4), whole, scales)
