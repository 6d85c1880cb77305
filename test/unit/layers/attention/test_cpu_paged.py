"""Attention over pages equals dense attention, whatever the pages, the chunks, the neighbours and the rubbish."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from paged_sequences import HEAD_DIM, SCALING, PagedSequences, dense_attention
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from sgl_batch.errors import ConfigError
from sgl_batch.layers.attention.cpu_paged import (
    CpuPagedAttention,
    decode_attention,
    page_table,
    prefill_attention,
)
from sgl_batch.mem_cache.page_layout import PanelLayout, PlainLayout

DECODE, EXTEND = ForwardMode.DECODE, ForwardMode.EXTEND
native_only = pytest.mark.parametrize("operators", ["native"], indirect=True)
torch_only = pytest.mark.parametrize("operators", ["torch"], indirect=True)


def lengths_around(page_size: int) -> list[int]:
    generator = torch.Generator().manual_seed(page_size)
    edges = [1, page_size - 1, page_size, page_size + 1, 2 * page_size, 600]
    return edges + torch.randint(1, 300, (6,), generator=generator).tolist()


def close(result: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-5) -> bool:
    return torch.allclose(result.double(), expected, rtol=tolerance, atol=tolerance)


def decoded(paged: PagedSequences, rows: list[int]) -> torch.Tensor:
    """Decode attention of the last token of some sequences, which lie in the pool already; [B, heads, dim]."""
    index = torch.tensor(rows)
    ends = torch.tensor([paged.lengths[row] for row in rows])
    k_pages, v_pages = paged.pool.get_kv_buffer(1)
    queries = torch.stack([paged.q[row][-1] for row in rows])
    q_BHGD = queries.view(len(rows), k_pages.shape[1], -1, HEAD_DIM)
    metadata = page_table(paged.req_to_token, index, ends, paged.pool.page_size)
    return decode_attention(q_BHGD, k_pages, v_pages, metadata, SCALING).flatten(1, 2)


def last_tokens(paged: PagedSequences, rows: list[int]) -> torch.Tensor:
    """Decode attention of the last token of some sequences through the backend; [B, heads * dim]."""
    return paged.attend(DECODE, {row: (paged.lengths[row] - 1, paged.lengths[row]) for row in rows})


# Decode.


@torch_only
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("page_size", [8, 64])
def test_decode_over_scattered_pages_equals_dense_attention(page_size, groups, dtype):
    lengths = lengths_around(page_size)
    paged = PagedSequences(lengths, page_size=page_size, groups=groups, dtype=dtype)
    paged.write(lengths)
    dense = [dense_attention(q[-1:], k, v)[0] for q, k, v in zip(paged.q, paged.k, paged.v, strict=True)]
    result = decoded(paged, list(range(len(lengths))))
    assert result.dtype == torch.float32
    assert close(result, torch.stack(dense))


@pytest.mark.parametrize("page_size", [8, 64])
def test_a_decode_row_has_the_same_bits_whatever_the_other_rows_are(page_size):
    lengths = lengths_around(page_size)
    paged = PagedSequences(lengths, page_size=page_size)
    paged.write(lengths)
    together = last_tokens(paged, list(range(len(lengths))))
    generator = torch.Generator().manual_seed(1)
    some = [torch.randperm(len(lengths), generator=generator)[: size + 1].tolist() for size in range(len(lengths))]
    for rows in [[row] for row in range(len(lengths))] + some:
        assert torch.equal(last_tokens(paged, rows), together[rows]), f"rows {rows}"


def test_a_decode_row_has_the_same_bits_in_whichever_pages_it_lies():
    lengths = [1, 8, 9, 100, 600]
    results = []
    for page_seed in range(3):
        paged = PagedSequences(lengths, page_seed=page_seed, spare_pages=5 * page_seed)
        paged.write(lengths)
        results.append(last_tokens(paged, [0, 1, 2, 3, 4]))
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@native_only
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("page_size", [8, 64])
def test_a_row_has_the_same_bits_however_its_prompt_is_chunked(page_size, dtype):
    total = 150
    paged = PagedSequences([total, 3], page_size=page_size, dtype=dtype)
    whole = paged.attend(EXTEND, {0: (0, total)})
    for size in (1, 7, 64, 149):
        cuts = [(start, min(start + size, total)) for start in range(0, total, size)]
        parts = [paged.attend(DECODE if end - start == 1 else EXTEND, {0: (start, end)}) for start, end in cuts]
        assert torch.equal(torch.cat(parts), whole), f"chunks of {size}"


@native_only
@pytest.mark.parametrize("page_size", [6, 7])
def test_pages_that_the_kernels_cannot_take_go_through_torch_operators(page_size):
    paged = PagedSequences([40], page_size=page_size, dtype=torch.bfloat16)
    paged.write([39])
    assert isinstance(paged.pool.layout, PanelLayout if page_size == 6 else PlainLayout)
    assert close(last_tokens(paged, [0]), paged.expected({0: (39, 40)}), 0.01)


def test_the_page_table_lists_pages_by_sequence_and_masks_what_no_token_has_filled():
    req_to_token = torch.tensor([[12, 13, 14, 15, 4, 5], [8, 9, 0, 0, 0, 0]], dtype=torch.int32)
    table = page_table(req_to_token, torch.tensor([1, 0]), torch.tensor([2, 6]), 4)
    assert table.pages_P.tolist() == [2, 3, 1]
    assert table.owner_P.tolist() == [0, 1, 1]
    assert table.num_pages_B.tolist() == [1, 2]
    assert table.bias_PS.isinf().tolist() == [[False] * 2 + [True] * 2, [False] * 4, [False] * 2 + [True] * 2]


# Prefill.


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize(("new", "total"), [(1, 1), (1, 9), (5, 5), (5, 64), (64, 65), (600, 600), (200, 600)])
def test_prefill_behind_a_prefix_equals_dense_attention(new, total, groups):
    paged = PagedSequences([total], groups=groups)
    q, k, v = paged.q[0][total - new :], paged.k[0], paged.v[0]
    assert close(prefill_attention(q, k, v, SCALING), dense_attention(q, k, v))


@pytest.mark.parametrize("cuts", range(2**6))
def test_a_prompt_chunked_in_any_way_equals_the_whole_prompt(cuts):
    """Bit i of `cuts` says whether a chunk ends after token i."""
    (q,), (k,), (v,) = (getattr(PagedSequences([7]), name) for name in "qkv")
    ends = [i + 1 for i in range(6) if cuts >> i & 1] + [7]
    starts = [0, *ends[:-1]]
    parts = [
        prefill_attention(q[start:end], k[:end], v[:end], SCALING) for start, end in zip(starts, ends, strict=True)
    ]
    assert close(torch.cat(parts), prefill_attention(q, k, v, SCALING).double(), 1e-6)


# The backend over a real pool.


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.01)], ids=str)
@pytest.mark.parametrize("page_size", [8, 64])
def test_the_backend_prefills_behind_prefixes_in_the_pool(page_size, dtype, tolerance):
    prefixes = [0, 1, page_size - 1, page_size, page_size + 1, 500, 0]
    news = [3, page_size, 1, 1, 2, 100, 1]
    spans = {row: (start, start + new) for row, (start, new) in enumerate(zip(prefixes, news, strict=True))}
    paged = PagedSequences([end for _, end in spans.values()], page_size=page_size, dtype=dtype)
    paged.write(prefixes)
    assert close(paged.attend(EXTEND, spans), paged.expected(spans), tolerance)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.01)], ids=str)
@pytest.mark.parametrize("page_size", [8, 64])
def test_the_backend_decodes_one_token_of_each_sequence(page_size, dtype, tolerance):
    lengths = lengths_around(page_size)
    paged = PagedSequences(lengths, page_size=page_size, dtype=dtype)
    paged.write([length - 1 for length in lengths])
    spans = {row: (lengths[row] - 1, lengths[row]) for row in reversed(range(len(lengths)))}
    assert close(paged.attend(DECODE, spans), paged.expected(spans), tolerance)


def test_sequences_prefilled_in_chunks_and_decoded_token_by_token_equal_dense_attention():
    lengths, prompts = [13, 40, 26], [1, 33, 16]
    paged = PagedSequences(lengths)
    for start in range(0, 33, 7):
        spans = {row: (start, min(start + 7, prompt)) for row, prompt in enumerate(prompts) if start < prompt}
        assert close(paged.attend(EXTEND, spans), paged.expected(spans))
    for step in range(12):
        spans = {
            row: (prompt + step, prompt + step + 1)
            for row, prompt in enumerate(prompts)
            if prompt + step < lengths[row]
        }
        if spans:
            assert close(paged.attend(DECODE, spans), paged.expected(spans))


def test_metadata_of_several_batches_is_made_first_and_swapped_later():
    paged = PagedSequences([20, 30, 9])
    paged.write([19, 29, 8])
    batches = [{0: (19, 20), 2: (8, 9)}, {1: (29, 30)}]
    plans = []
    for spans in batches:
        paged.backend.init_forward_metadata(paged.batch(DECODE, spans))
        plans.append(paged.backend.forward_metadata)
    for spans, plan in reversed(list(zip(batches, plans, strict=True))):
        paged.backend.forward_metadata = plan
        result = paged.backend.forward_decode(*paged.rows(spans), paged.layer, paged.batch(DECODE, spans))
        assert close(result, paged.expected(spans))


@pytest.mark.parametrize("mode", [DECODE, EXTEND], ids=["decode", "extend"])
@pytest.mark.parametrize("save", [True, False])
def test_kv_is_written_at_the_batchs_kv_indices_only_and_only_when_requested(mode, save):
    paged = PagedSequences([9, 4])
    paged.write([8, 3])
    before = [pages.clone() for pages in (*paged.pool.k_pages, *paged.pool.v_pages)]
    paged.attend(mode, {0: (8, 9), 1: (3, 4)}, save_kv_cache=save)
    if save:
        changed = PagedSequences([9, 4])
        changed.write([9, 4])
        before = [*changed.pool.k_pages, *changed.pool.v_pages]
    after = [*paged.pool.k_pages, *paged.pool.v_pages]
    assert all(torch.equal(old, new) for old, new in zip(before, after, strict=True))


# Refusals.


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"logit_cap": 30.0}, "logit_cap"),
        ({"is_cross_attention": True}, "is_cross_attention"),
        ({"attn_type": AttentionType.ENCODER_ONLY}, "attn_type encoder_only"),
        ({"logit_cap": 30.0, "is_cross_attention": True}, "logit_cap, is_cross_attention"),
    ],
    ids=str,
)
@pytest.mark.parametrize("mode", [DECODE, EXTEND], ids=["decode", "extend"])
def test_attention_of_another_kind_is_refused_by_name(mode, fields, named):
    paged = PagedSequences([4])
    paged.layer = RadixAttention(4, HEAD_DIM, SCALING, 2, layer_id=1, **fields)
    with pytest.raises(ConfigError, match=f"this model asks for {named}$"):
        paged.attend(mode, {0: (3, 4)})


def _fourth_token(mode):
    """Return a sequence of which three tokens are written, and what computes the fourth: forward, batch and spans."""
    paged, spans = PagedSequences([4]), {0: (3, 4)}
    paged.write([3])
    batch = paged.batch(mode, spans)
    paged.backend.init_forward_metadata(batch)
    return paged, paged.backend.forward_decode if mode.is_decode() else paged.backend.forward_extend, batch, spans


@pytest.mark.parametrize("mode", [DECODE, EXTEND], ids=["decode", "extend"])
def test_an_argument_that_we_do_not_know_is_refused_unless_it_is_none(mode):
    paged, forward, batch, spans = _fourth_token(mode)
    assert close(forward(*paged.rows(spans), paged.layer, batch, rope=None), paged.expected(spans))
    with pytest.raises(ConfigError, match=r"this model asks for rope$"):
        forward(*paged.rows(spans), paged.layer, batch, rope=torch.zeros(4))


@pytest.mark.parametrize("mode", [DECODE, EXTEND], ids=["decode", "extend"])
def test_queries_may_have_a_row_for_each_head(mode):
    paged, forward, batch, spans = _fourth_token(mode)
    q, k, v = paged.rows(spans)
    assert close(forward(q.view(-1, HEAD_DIM), k, v, paged.layer, batch), paged.expected(spans))


def test_a_pool_of_another_layout_is_refused_by_its_type():
    runner = SimpleNamespace(token_to_kv_pool={}, req_to_token_pool=None)
    with pytest.raises(ConfigError, match="keeps its KV in dict, which the CPU attention backend cannot read"):
        CpuPagedAttention(runner)


@torch_only
@pytest.mark.parametrize(("planned", "run"), [(DECODE, EXTEND), (EXTEND, DECODE)], ids=["decode", "extend"])
def test_a_phase_does_not_run_with_the_metadata_of_the_other(planned, run):
    paged = PagedSequences([4])
    spans = {0: (3, 4)}
    paged.backend.init_forward_metadata(paged.batch(planned, spans))
    forward = paged.backend.forward_decode if run.is_decode() else paged.backend.forward_extend
    with pytest.raises(AssertionError, match=r"runs under (decode|prefill) metadata"):
        forward(*paged.rows(spans), paged.layer, paged.batch(run, spans))
