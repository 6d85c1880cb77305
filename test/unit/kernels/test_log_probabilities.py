"""Log probabilities of any row: wide ones, ties, numbers that are none, rows that lie apart, a row by itself."""

from __future__ import annotations

import math

import pytest
import sgl_batch_kernel
import torch


def reference(logits, temperatures):
    return torch.log_softmax(logits.double() / temperatures.double()[:, None], dim=-1)


def rows_of(count, spread, num_rows=12):
    generator = torch.Generator().manual_seed(count)
    logits = spread * torch.randn(num_rows, count, generator=generator)
    tokens = torch.randint(count, (num_rows,), generator=generator)
    return logits, tokens, 0.2 + torch.rand(num_rows, generator=generator)


@pytest.mark.parametrize("count", [1, 2, 127, 128, 129, 5000, 70_000])
@pytest.mark.parametrize("spread", [0.0, 1.0, 8.0, 60.0], ids=lambda spread: f"spread {spread:g}")
def test_they_are_those_of_a_log_softmax_in_float64(count, spread):
    logits, tokens, temperatures = rows_of(count, spread)
    expected, top = reference(logits, temperatures), min(count, 40)
    found = sgl_batch_kernel.log_probabilities(logits, tokens, top, temperatures)
    own = expected.gather(1, tokens[:, None]).squeeze(1)
    torch.testing.assert_close(found.of_tokens_T.double(), own, rtol=1e-6, atol=2e-6)
    best = logits.sort(dim=-1, descending=True, stable=True).indices[:, :top]
    assert torch.equal(found.top_tokens_TK, best)
    torch.testing.assert_close(found.top_values_TK.double(), expected.gather(1, best), rtol=1e-6, atol=2e-6)
    again = (logits.gather(1, tokens[:, None]).squeeze(1) - found.largest_T) / temperatures - found.log_sums_T
    torch.testing.assert_close(again, found.of_tokens_T, rtol=1e-6, atol=2e-6)


def test_without_temperatures_they_are_those_over_one():
    logits, tokens, _ = rows_of(5000, 3.0)
    plain, over_one = (sgl_batch_kernel.log_probabilities(logits, tokens, 3, over) for over in (None, torch.ones(12)))
    for one, other in zip(plain, over_one, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("top", [1, 2, 5, 300])
def test_equal_logits_come_in_the_order_of_tokens(top):
    logits = torch.zeros(2, 300)
    logits[0, [299, 7, 130]] = 2.0
    logits[1, ::2] = -0.0  # equal to 0
    found = sgl_batch_kernel.log_probabilities(logits, torch.zeros(2, dtype=torch.int64), top)
    expected = logits.sort(dim=-1, descending=True, stable=True).indices[:, :top]
    assert torch.equal(found.top_tokens_TK, expected)
    assert expected[0, :3].tolist() == [7, 130, 299][:top]


def test_forbidden_tokens_have_minus_infinity():
    logits = torch.full((1, 1000), -torch.inf)
    logits[0, [3, 500]] = torch.tensor([1.0, 2.0])
    found = sgl_batch_kernel.log_probabilities(logits, torch.tensor([9]), 3)
    assert found.of_tokens_T.item() == -math.inf
    assert found.top_tokens_TK.tolist() == [[500, 3, 0]]
    expected = [-math.log1p(math.exp(-1.0)), -1 - math.log1p(math.exp(-1.0)), -math.inf]
    assert found.top_values_TK[0].tolist() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("number", [math.nan, -math.nan, math.inf])
@pytest.mark.parametrize("place", [0, 200, 999])
def test_a_row_with_a_number_that_is_none_has_nan_and_no_other_row_has(number, place):
    logits, tokens, _ = rows_of(1000, 2.0, num_rows=3)
    logits[1, place] = number
    found = sgl_batch_kernel.log_probabilities(logits, tokens, 4)
    assert found.of_tokens_T.isnan().tolist() == [False, True, False]
    assert found.top_values_TK.isnan().all(1).tolist() == [False, True, False]
    assert found.top_tokens_TK[1, 0] == place


def test_a_row_without_an_allowed_token_has_nan():
    found = sgl_batch_kernel.log_probabilities(torch.full((1, 200), -torch.inf), torch.tensor([5]), 2)
    assert found.of_tokens_T.isnan().all()
    assert found.top_values_TK.isnan().all()
    assert found.top_tokens_TK.tolist() == [[0, 1]]


def test_a_row_alone_has_the_bits_that_it_has_among_others_which_may_lie_apart():
    logits, tokens, temperatures = rows_of(5001, 4.0, num_rows=40)
    together = sgl_batch_kernel.log_probabilities(logits, tokens, 7, temperatures)
    apart = torch.zeros(40, 5100)[:, :5001].copy_(logits)
    for row in range(40):
        own = slice(row, row + 1)
        alone = sgl_batch_kernel.log_probabilities(apart[own], tokens[own], 7, temperatures[own])
        for one, all_ in zip(alone, together, strict=True):
            assert torch.equal(one, all_[own])


def test_no_row_has_none():
    found = sgl_batch_kernel.log_probabilities(torch.zeros(0, 9), torch.zeros(0, dtype=torch.int64), 3)
    assert [tuple(one.shape) for one in found] == [(0,), (0, 3), (0, 3), (0,), (0,)]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"logits": torch.zeros(2, 9).bfloat16()}, "use float32"),
        ({"logits": torch.zeros(2, 18)[:, ::2]}, "contiguous rows"),
        ({"logits": torch.zeros(2, 0)}, "at least one number"),
        ({"tokens": torch.tensor([0, 9])}, "token 9 of row 1 is not one of 9"),
        ({"tokens": torch.tensor([-1, 0])}, "token -1 of row 0"),
        ({"tokens": torch.tensor([0])}, "one for each of 2 rows"),
        ({"tokens": torch.tensor([0, 1], dtype=torch.int32)}, "int64"),
        ({"top": 10}, "top is 10; it is from 0 to the 9 numbers of a row"),
        ({"top": -1}, "top is -1"),
        ({"temperatures": torch.ones(3)}, "one for each of 2 rows"),
        ({"temperatures": torch.ones(2).double()}, "float32"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused(change, message):
    given = {"logits": torch.zeros(2, 9), "tokens": torch.tensor([0, 8]), "top": 2, "temperatures": None, **change}
    with pytest.raises(RuntimeError, match=message):
        sgl_batch_kernel.log_probabilities(*given.values())
