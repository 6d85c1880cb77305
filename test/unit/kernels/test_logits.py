"""Tokens that a row does not allow get minus infinity, and logits are penalised, whatever a row's length and place."""

from __future__ import annotations

import pytest
import sgl_batch_kernel
import torch
from xgrammar import apply_token_bitmask_inplace

INFINITY = float("inf")


def words_of(bits: torch.Tensor) -> torch.Tensor:
    """Pack booleans [T, V] as xgrammar does: 32 tokens a word, the first one in the lowest bit."""
    rows, count = bits.shape
    padded = torch.zeros(rows, -(-count // 32) * 32, dtype=torch.int64)
    padded[:, :count] = bits
    return (padded.view(rows, -1, 32) << torch.arange(32)).sum(-1).to(torch.int32)


def drawn(rows: int, count: int, share: float) -> torch.Tensor:
    return torch.rand(rows, count, generator=torch.Generator().manual_seed(count)) < share


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("count", [1, 31, 32, 33, 1000, 16_384, 40_001])
@pytest.mark.parametrize("share", [0.0, 0.1, 0.9, 1.0])
def test_tokens_that_are_not_allowed_get_minus_infinity_and_the_others_keep_their_logits(dtype, count, share):
    allowed, wide = drawn(5, count, share), torch.randn(5, count + 7).to(dtype)
    wide[:, -1] = INFINITY
    before = wide.clone()
    sgl_batch_kernel.mask_tokens(wide[:, :count], words_of(allowed))
    assert torch.equal(wide[:, :count], before[:, :count].masked_fill(~allowed, -INFINITY))
    assert torch.equal(wide[:, count:], before[:, count:]), "what lies behind a row is another's"


def test_it_does_what_xgrammar_does():
    logits, words = torch.randn(9, 3072), words_of(drawn(9, 3072, 0.3))
    expected = logits.clone()
    apply_token_bitmask_inplace(expected, words)
    sgl_batch_kernel.mask_tokens(logits, words)
    assert torch.equal(logits, expected)


def test_tokens_behind_the_mask_stay():
    logits = torch.zeros(1, 100)
    sgl_batch_kernel.mask_tokens(logits, torch.zeros(1, 2, dtype=torch.int32))
    assert logits.tolist() == [[-INFINITY] * 64 + [0.0] * 36]


def test_a_nan_that_is_not_allowed_is_taken_out():
    logits = torch.full((1, 64), float("nan"))
    sgl_batch_kernel.mask_tokens(logits, torch.zeros(1, 2, dtype=torch.int32))
    assert logits.tolist() == [[-INFINITY] * 64]


@pytest.mark.parametrize(
    ("logits", "allowed", "message"),
    [
        (torch.zeros(64, 2).T, torch.zeros(2, 2, dtype=torch.int32), "logits are"),
        (torch.zeros(2, 64, dtype=torch.float64), torch.zeros(2, 2, dtype=torch.int32), "logits is"),
        (torch.zeros(2, 64), torch.zeros(3, 2, dtype=torch.int32), "allowed is"),
        (torch.zeros(2, 64), torch.zeros(2, 2, dtype=torch.int64), "allowed is"),
        (torch.zeros(2, 64), torch.zeros(2, 4, dtype=torch.int32)[:, ::2], "allowed is not contiguous"),
    ],
    ids=["strides", "number type", "rows", "bits' type", "bits apart"],
)
def test_tensors_that_do_not_fit_are_refused(logits, allowed, message):
    with pytest.raises(RuntimeError, match=message):
        sgl_batch_kernel.mask_tokens(logits, allowed)


@pytest.mark.parametrize("shape", [(1, 1), (3, 17), (2, 16_384), (3, 40_001), (0, 5)])
def test_a_penalty_moves_a_logit_down_with_the_bits_of_torch(shape):
    generator = torch.Generator().manual_seed(shape[1])
    logits = 5 * torch.randn(shape, generator=generator)
    logits.view(-1)[::7] = 0.0
    logits.view(-1)[3::11] = -INFINITY
    penalties = torch.where(torch.rand(shape, generator=generator) < 0.3, 1.1, 1.0)
    expected = torch.where(logits < 0, logits * penalties, logits / penalties)
    sgl_batch_kernel.penalize_repetition(logits, penalties)
    assert torch.equal(logits, expected)


@pytest.mark.parametrize(
    ("logits", "penalties", "message"),
    [
        (torch.zeros(2, 4), torch.ones(2, 3), "logits are"),
        (torch.zeros(2, 4), torch.ones(2, 4).double(), "logits are"),
        (torch.zeros(2, 4).bfloat16(), torch.ones(2, 4), "logits are"),
        (torch.zeros(2, 8)[:, :4], torch.ones(2, 4), "logits is not contiguous"),
    ],
    ids=["sizes", "penalties' type", "logits' type", "rows apart"],
)
def test_penalties_that_do_not_fit_are_refused(logits, penalties, message):
    with pytest.raises(RuntimeError, match=message):
        sgl_batch_kernel.penalize_repetition(logits, penalties)
