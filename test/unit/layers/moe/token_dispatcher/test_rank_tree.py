"""The ranks' partial sums of the same tokens are added in the order of a combine, with its bits."""

from __future__ import annotations

import pytest
import torch

from sgl_batch.layers.moe.token_dispatcher.rank_tree import sum_of_partials, sum_over_ranks


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7])
def test_partial_sums_of_all_tokens_have_the_bits_of_a_combine(ranks):
    draw = torch.Generator().manual_seed(ranks)
    partials_TRM = torch.randn(50, ranks, 9, generator=draw)
    partials_TRM[::3] *= -0.0
    has_TR = torch.rand(50, ranks, generator=draw) < 0.6
    tokens = [has_TR[:, rank].nonzero()[:, 0] for rank in range(ranks)]
    expected_TM = sum_over_ranks(tokens, [partials_TRM[own, rank] for rank, own in enumerate(tokens)], 50)
    expected_TM[~has_TR.any(1)] = 0.0
    found_TM = sum_of_partials(partials_TRM.masked_fill(~has_TR[..., None], 0.0), has_TR)
    assert torch.equal(found_TM.view(torch.int32), expected_TM.view(torch.int32))
