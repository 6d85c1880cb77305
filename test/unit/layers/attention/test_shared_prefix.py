"""A prompt finds what a prompt before it in the same pass computes: a sub-batch writes all its KV before it attends."""

from __future__ import annotations

import pytest
import torch
from paged_sequences import LatentSequences, PagedSequences
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from sgl_batch.core.plan import cut_sequences, row_spans

PAGE = 8
LENGTHS = [20, 21, 11, 17]
SHARED = [0, 2 * PAGE, PAGE, 2 * PAGE]  # tokens of the first sequence's prompt with which the others begin


@pytest.mark.parametrize("sub_batch", [1, 7, 16, 64])
@pytest.mark.parametrize("kind", [PagedSequences, LatentSequences])
def test_prompts_begin_with_pages_that_a_prompt_before_them_writes(kind, sub_batch):
    paged = kind(LENGTHS, page_size=PAGE)
    for follower in (1, 2, 3):
        paged.share(0, follower, SHARED[follower])
    news = [length - shared for length, shared in zip(LENGTHS, SHARED, strict=True)]
    parts = []
    for span in row_spans(sum(news), sub_batch):
        pieces = cut_sequences(news, span)
        spans = {p.index: (SHARED[p.index] + p.start, SHARED[p.index] + p.end) for p in pieces}
        parts.append(paged.attend(ForwardMode.EXTEND, spans))
    expected = paged.expected({row: (SHARED[row], LENGTHS[row]) for row in range(len(LENGTHS))})
    assert torch.allclose(torch.cat(parts).double(), expected, rtol=1e-5, atol=1e-5)
