"""Metadata of sub-batches shares the memory of partial sums. test/integration tests attention with it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from sgl_batch.sglang_adapter.triton_attention import share_scratch


def decode_plan(rows: int) -> Any:
    return SimpleNamespace(attn_logits=torch.zeros(rows, 2, 4, 8), attn_lse=torch.zeros(rows, 2, 4))


def test_partial_sums_of_a_sub_batch_lie_where_those_of_the_first_do() -> None:
    first, last = decode_plan(4), decode_plan(3)
    share_scratch(first, first)
    share_scratch(last, first)
    assert last.attn_logits.shape == (3, 2, 4, 8)
    assert last.attn_lse.shape == (3, 2, 4)
    assert last.attn_logits.data_ptr() == first.attn_logits.data_ptr()
    assert last.attn_lse.data_ptr() == first.attn_lse.data_ptr()


def test_a_larger_sub_batch_and_prompts_keep_their_own() -> None:
    first, larger, prompts = decode_plan(3), decode_plan(4), SimpleNamespace(attn_logits=None, attn_lse=None)
    own = larger.attn_logits
    share_scratch(larger, first)
    assert larger.attn_logits is own
    share_scratch(prompts, prompts)
    share_scratch(prompts, prompts.__class__(attn_logits=None, attn_lse=None))
    assert prompts.attn_logits is None
