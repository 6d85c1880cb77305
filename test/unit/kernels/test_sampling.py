"""A token is drawn from any row: wide ones, tokens of no probability, numbers that are none, rows that lie apart."""

from __future__ import annotations

import pytest
import sgl_batch_kernel
import torch

ALL = 1 << 30


def sample(probs, *, top_k=ALL, top_p=1.0, min_p=0.0, uniform=0.5):
    """Draw with the same limits in all rows, or with a list of them, one for each row."""
    given = (top_k, torch.int32), (top_p, torch.float32), (min_p, torch.float32), (uniform, torch.float64)
    columns = [
        torch.tensor(one if isinstance(one, list) else [one] * len(probs), dtype=dtype).reshape(-1)
        for one, dtype in given
    ]
    return sgl_batch_kernel.sample(probs, *columns)


def reference(row, top_k, top_p, min_p, uniform):
    """Sort and walk, in float64."""
    values, tokens = row.double().sort(descending=True, stable=True)
    before = values.cumsum(0) - values
    keep = (torch.arange(len(row)) < top_k) & (before <= top_p) & (values >= (row.max() * min_p).double())
    if top_k >= ALL and top_p == 1 and min_p <= 0:
        values, tokens, keep = row.double(), torch.arange(len(row)), torch.ones(len(row), dtype=torch.bool)
    total = torch.where(keep, values, 0.0).cumsum(0)
    return int(tokens[int((total <= uniform * total[-1]).sum())])


@pytest.mark.parametrize("count", [1, 2, 127, 128, 129, 5000, 70_000])
@pytest.mark.parametrize("spread", [0.0, 1e-4, 1.0, 8.0, 60.0], ids=lambda spread: f"spread {spread:g}")
def test_a_row_is_cut_and_drawn_as_a_sort_cuts_and_draws_it(count, spread):
    generator = torch.Generator().manual_seed(count)
    limits = [
        (top_k, float(torch.tensor(top_p)), float(torch.tensor(min_p)))
        for top_k in (1, 2, 40, 3000, ALL)
        for top_p in (0.0, 0.3, 0.95, 1.0)
        for min_p in (0.0, 0.05, 1.0)
    ]
    probs = torch.softmax(spread * torch.randn(len(limits), count, generator=generator), dim=-1)
    uniforms = torch.rand(len(limits), generator=generator, dtype=torch.float64).tolist()
    columns = [list(column) for column in zip(*limits, strict=True)]
    drawn = sample(probs, top_k=columns[0], top_p=columns[1], min_p=columns[2], uniform=uniforms)
    assert drawn.dtype == torch.int64
    expected = [reference(row, *limit, uniform) for row, limit, uniform in zip(probs, limits, uniforms, strict=True)]
    assert drawn.tolist() == expected


@pytest.mark.parametrize("uniform", [0.0, 1 - 2.0**-53])
@pytest.mark.parametrize("limits", [{}, {"top_k": 50}, {"top_p": 0.999}, {"min_p": 1e-30}], ids=str)
def test_a_token_without_probability_is_never_drawn(limits, uniform):
    probs = torch.zeros(2, 1000)
    probs[0, 700] = probs[1, 300] = 1.0
    probs[1, 301] = 1e-42
    assert sample(probs, uniform=uniform, **limits).tolist() == [700, 300]


@pytest.mark.parametrize("limits", [{}, {"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.1}], ids=str)
@pytest.mark.parametrize("number", [float("nan"), float("inf"), -1.0, 0.0, 3.0])
def test_numbers_that_are_no_probabilities_still_give_a_token_of_the_row(limits, number):
    probs = torch.full((3, 500), number)
    probs[1, 17] = 0.5
    probs[2] = torch.rand(500)
    probs[2, 400] = number
    drawn = sample(probs, uniform=0.999, **limits)
    assert ((drawn >= 0) & (drawn < 500)).all()


def test_rows_may_lie_apart_and_threads_do_not_change_a_token():
    wide = torch.softmax(3 * torch.randn(40, 3000, generator=torch.Generator().manual_seed(0)), dim=-1)
    part = wide[:, :2500]
    uniform = torch.rand(40, generator=torch.Generator().manual_seed(1), dtype=torch.float64).tolist()
    expected = sample(part.contiguous(), top_p=0.8, uniform=uniform)
    assert torch.equal(sample(part, top_p=0.8, uniform=uniform), expected)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        assert torch.equal(sample(part, top_p=0.8, uniform=uniform), expected)
    finally:
        torch.set_num_threads(before)
    assert sample(part[:0]).shape == (0,)


def test_a_smaller_row_after_a_large_one_does_not_see_its_numbers():
    large = torch.softmax(torch.randn(2, 9000, generator=torch.Generator().manual_seed(0)), dim=-1)
    small = torch.tensor([[0.75, 0.25]])
    sample(large, top_p=0.9)
    assert [sample(small, top_p=0.9, uniform=number).item() for number in (0.0, 0.74, 0.76)] == [0, 0, 1]


def of_logits(logits, temperatures, uniforms, *, top_p=1.0, min_p=0.0):
    ones = torch.ones(len(logits))
    limits = torch.full((len(logits),), ALL, dtype=torch.int32), top_p * ones, min_p * ones
    before = logits.clone()
    tokens = sgl_batch_kernel.sample(logits, *limits, uniforms, temperatures)
    assert torch.equal(before.nan_to_num(7), logits.nan_to_num(7)), "logits are left as they are"
    return tokens


@pytest.mark.parametrize("limits", [{}, {"top_p": 0.9, "min_p": 1e-4}], ids=["all", "cut"])
@pytest.mark.parametrize("temperature", [0.1, 0.7, 1.9, 30.0])
@pytest.mark.parametrize("count", [15, 129, 151_936])
def test_tokens_are_drawn_from_logits_as_from_their_softmax(count, temperature, limits):
    generator = torch.Generator().manual_seed(count)
    logits = (5 * torch.randn(1, count, generator=generator) + 40).expand(60, -1).contiguous()
    logits[:, count // 2 + 1 :: 3] = -torch.inf
    uniforms = torch.rand(60, generator=generator, dtype=torch.float64)
    drawn = of_logits(logits, torch.full((60, 1), temperature), uniforms, **limits)
    probs = torch.softmax(logits[0].double() / temperature, dim=-1)
    values, order = probs.sort(descending=True, stable=True) if limits else (probs, torch.arange(count))
    if limits:
        values = torch.where((values.cumsum(0) - values <= 0.9) & (values >= 1e-4 * values[0]), values, 0.0)
    # Rounding may move the end of a token's share of [0, 1), and order tokens of nearly the same probability otherwise.
    ends = values.cumsum(0) / values.sum()
    place = torch.empty_like(order).scatter_(0, order, torch.arange(count))[drawn]
    assert (values[place] > 0).all()
    assert ((ends - values / values.sum())[place] <= uniforms + 2e-6).all()
    assert (ends[place] >= uniforms - 2e-6).all()


def test_a_row_of_logits_draws_alone_what_it_draws_among_others_that_lie_apart():
    wide = torch.randn(40, 1100, generator=torch.Generator().manual_seed(0))
    wide[:, 1000:] = 50.0  # not of the rows
    temperatures, uniforms = torch.linspace(0.5, 1.5, 40), torch.linspace(0, 0.99, 40, dtype=torch.float64)
    together = of_logits(wide[:, :1000], temperatures, uniforms)
    for row in range(40):
        place = slice(row, row + 1)
        assert of_logits(wide[place, :1000].clone(), temperatures[place], uniforms[place]) == together[row]
    assert len(set(together.tolist())) > 30


def test_logits_without_a_softmax_draw_token_0_and_leave_other_rows_alone():
    logits = torch.zeros(5, 300)
    logits[0, 7], logits[1, 299], logits[2] = torch.nan, torch.inf, -torch.inf
    logits[3, 8:] = torch.tensor([0x7FC00001], dtype=torch.int32).view(torch.float32)  # a NaN that carries a number
    uniforms = torch.full((5,), 0.5, dtype=torch.float64)
    for top_p, drawn in ((0.9, 135), (1.0, 150)):
        assert of_logits(logits, torch.ones(5), uniforms, top_p=top_p).tolist() == [0, 0, 0, 0, drawn]


@pytest.mark.parametrize(
    "probs", [torch.ones(2, 0), torch.ones(8, 2).T, torch.ones(4)], ids=["empty", "strides", "1-d"]
)
def test_rows_that_do_not_fit_are_refused(probs):
    with pytest.raises(RuntimeError, match="probs are"):
        sample(probs)


def test_limits_of_another_type_or_number_are_refused():
    probs = torch.full((2, 4), 0.25)
    good = [torch.ones(2, dtype=torch.int32), torch.ones(2), torch.zeros(2), torch.zeros(2, dtype=torch.float64)]
    for at, name in enumerate(("top_ks", "top_ps", "min_ps", "uniforms")):
        for wrong in (good[at].half(), good[at][:1]):
            with pytest.raises(RuntimeError, match=f"{name} is "):
                sgl_batch_kernel.sample(probs, *good[:at], wrong, *good[at + 1 :])
    for wrong in (torch.ones(2).double(), torch.ones(3)):
        with pytest.raises(RuntimeError, match="temperatures is "):
            sgl_batch_kernel.sample(probs, *good, wrong)
    with pytest.raises(RuntimeError, match="probs are"):
        sgl_batch_kernel.sample(probs.double(), *good)
