"""Attention whose query heads ranks share has the bits of one rank, on every rank; KV is whole on each."""

from __future__ import annotations

import pytest
import torch
from column_gathers import on_each, splits
from paged_sequences import LATENT_DIM, LatentSequences, PagedSequences
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from sgl_batch.layers.column_split import ColumnSplit

DECODE, EXTEND = ForwardMode.DECODE, ForwardMode.EXTEND
PREFIXES, NEWS = [0, 1, 8, 150, 63], [3, 20, 1, 100, 1]
SPANS = {row: (start, start + new) for row, (start, new) in enumerate(zip(PREFIXES, NEWS, strict=True))}
LASTS = {row: (end - 1, end) for row, (_, end) in SPANS.items()}
ENDS = [end for _, end in SPANS.values()]
native_only = pytest.mark.parametrize("operators", ["native"], indirect=True)
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
modes = pytest.mark.parametrize("mode", [EXTEND, DECODE], ids=["prefill", "decode"])


def attended(paged: PagedSequences, mode: ForwardMode, split: ColumnSplit | None) -> torch.Tensor:
    paged.write(PREFIXES if mode == EXTEND else ENDS)
    paged.backend.split.current = split
    return paged.attend(mode, SPANS if mode == EXTEND else LASTS)


@native_only
@dtypes
@modes
@pytest.mark.parametrize(
    ("num_ranks", "kv_heads", "groups"), [(2, 2, 2), (2, 1, 4), (4, 2, 4), (2, 3, 1), (4, 2, 3), (3, 1, 2)], ids=str
)
def test_heads_that_ranks_share_have_the_bits_of_one_rank(mode, dtype, num_ranks, kv_heads, groups):
    options = {"page_size": 8, "dtype": dtype, "kv_heads": kv_heads, "groups": groups}
    expected = attended(PagedSequences(ENDS, **options), mode, None)
    split = splits(num_ranks)
    found = on_each(split, lambda _, one: attended(PagedSequences(ENDS, **options), mode, one))
    assert all(torch.equal(one, expected) for one in found)


@native_only
@modes
@pytest.mark.parametrize(("window", "sinks"), [(20, False), (0, True), (65, True)])
def test_windows_and_sinks_of_shared_heads_have_the_bits_of_one_rank(mode, window, sinks):
    options = {"page_size": 8, "window": window, "sinks": sinks, "groups": 3}
    expected = attended(PagedSequences(ENDS, **options), mode, None)
    found = on_each(splits(2), lambda _, one: attended(PagedSequences(ENDS, **options), mode, one))
    assert all(torch.equal(one, expected) for one in found)


@native_only
@dtypes
@modes
@pytest.mark.parametrize(("num_ranks", "heads"), [(2, 4), (2, 3), (4, 70), (3, 2)])
def test_each_rank_computes_its_own_heads_of_latent_attention(mode, dtype, num_ranks, heads):
    options = {"page_size": 64, "dtype": dtype, "heads": heads}
    expected = attended(LatentSequences(ENDS, **options), mode, None)

    def own_heads(_: int, split: ColumnSplit) -> torch.Tensor:
        rows = attended(LatentSequences(ENDS, **options), mode, split)
        return split.columns(heads * LATENT_DIM, LATENT_DIM, lambda first, last: rows[:, first:last])

    assert all(torch.equal(one, expected) for one in on_each(splits(num_ranks), own_heads))


@native_only
def test_attention_to_few_tokens_is_not_shared():
    paged = PagedSequences([200])
    paged.write([200])
    (split,) = splits(1, least_bytes=1 << 20)
    paged.backend.split.current = split
    paged.attend(DECODE, {0: (199, 200)})
    assert split.counters.counts["column_gathers"] == 0
