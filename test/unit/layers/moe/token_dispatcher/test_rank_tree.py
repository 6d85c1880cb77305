"""The ranks' partial sums of the same tokens are added in the order of a combine, with its bits."""

from __future__ import annotations

import pytest
import torch

from sgl_batch.kernel_loader import native_kernels
from sgl_batch.layers.moe.token_dispatcher.rank_tree import sum_over_ranks

TOKENS, LOCAL = 50, 3


def choices(ranks: int) -> torch.Tensor:
    """Two experts of each token, some tokens with one or none."""
    draw = torch.Generator().manual_seed(ranks)
    ids_TK = torch.stack([torch.randperm(ranks * LOCAL, generator=draw)[:2] for _ in range(TOKENS)])
    return ids_TK.masked_fill(torch.rand(TOKENS, 2, generator=draw) < 0.4, -1).to(torch.int32)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7])
def test_partial_sums_of_all_tokens_have_the_bits_of_a_combine(ranks):
    ids_TK, draw = choices(ranks), torch.Generator().manual_seed(ranks)
    partials_TRM = torch.randn(TOKENS, ranks, 9, generator=draw)
    partials_TRM[::3] *= -0.0
    has_TR = (ids_TK[..., None].div(LOCAL, rounding_mode="floor") == torch.arange(ranks)).any(1)
    tokens = [has_TR[:, rank].nonzero()[:, 0] for rank in range(ranks)]
    expected_TM = sum_over_ranks(tokens, [partials_TRM[own, rank] for rank, own in enumerate(tokens)], TOKENS)
    expected_TM[~has_TR.any(1)] = 0.0
    found_TM = torch.full((TOKENS, 9), torch.nan)
    native_kernels().sum_partials_(found_TM, partials_TRM, ids_TK, ranks * LOCAL)
    assert torch.equal(found_TM.view(torch.int32), expected_TM.view(torch.int32))


def test_the_choices_of_a_shard_have_its_own_numbers():
    ids_TK = choices(4)
    own_TK = native_kernels().own_choices(ids_TK, LOCAL, LOCAL)
    is_own = (ids_TK >= LOCAL) & (ids_TK < 2 * LOCAL)
    assert 0 < is_own.sum() < ids_TK.numel()
    assert torch.equal(own_TK, torch.where(is_own, ids_TK - LOCAL, -1).to(torch.int32))


def test_partial_sums_of_another_form_are_refused():
    ids_TK, kernels = choices(2), native_kernels()
    with pytest.raises(RuntimeError, match="7 experts do not make equal shards of 2 ranks"):
        kernels.sum_partials_(torch.zeros(TOKENS, 9), torch.zeros(TOKENS, 2, 9), ids_TK, 7)
    with pytest.raises(RuntimeError, match="ids are Long; use int32"):
        kernels.own_choices(ids_TK.long(), 0, 3)
