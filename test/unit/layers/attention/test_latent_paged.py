"""Latent attention over pages equals dense attention with one row for all heads, and a row's bits are its own."""

from __future__ import annotations

import pytest
import torch
from paged_sequences import HEAD_DIM, SCALING, LatentSequences
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from sgl_batch.errors import ConfigError

DECODE, EXTEND = ForwardMode.DECODE, ForwardMode.EXTEND
native_only = pytest.mark.parametrize("operators", ["native"], indirect=True)
dtypes = pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.01)], ids=str)
page_sizes = pytest.mark.parametrize("page_size", [8, 64])


def close(result: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-5) -> bool:
    return torch.allclose(result.double(), expected, rtol=tolerance, atol=tolerance)


@dtypes
@page_sizes
@pytest.mark.parametrize("heads", [1, 3, 70])
def test_decode_over_scattered_pages_equals_dense_attention(heads, page_size, dtype, tolerance):
    lengths = [1, page_size - 1, page_size, page_size + 1, 200]
    paged = LatentSequences(lengths, heads=heads, page_size=page_size, dtype=dtype)
    paged.write([length - 1 for length in lengths])
    spans = {row: (lengths[row] - 1, lengths[row]) for row in reversed(range(len(lengths)))}
    assert close(paged.attend(DECODE, spans), paged.expected(spans), tolerance)


@dtypes
@page_sizes
def test_prefill_behind_prefixes_equals_dense_attention(page_size, dtype, tolerance):
    prefixes, news = [0, 1, page_size - 1, page_size, 150, 0], [3, page_size, 1, 2, 100, 1]
    spans = {row: (start, start + new) for row, (start, new) in enumerate(zip(prefixes, news, strict=True))}
    paged = LatentSequences([end for _, end in spans.values()], page_size=page_size, dtype=dtype)
    paged.write(prefixes)
    assert close(paged.attend(EXTEND, spans), paged.expected(spans), tolerance)


@native_only
@page_sizes
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_row_has_the_same_bits_however_its_prompt_is_chunked(page_size, dtype):
    total = 150
    paged = LatentSequences([total, 3], page_size=page_size, dtype=dtype)
    whole = paged.attend(EXTEND, {0: (0, total)})
    for size in (1, 7, 64, 149):
        cuts = [(start, min(start + size, total)) for start in range(0, total, size)]
        parts = [paged.attend(DECODE if end - start == 1 else EXTEND, {0: (start, end)}) for start, end in cuts]
        assert torch.equal(torch.cat(parts), whole), f"chunks of {size}"


@pytest.mark.parametrize(("asked", "named"), [({"window": 8}, "sliding_window_size"), ({"sinks": True}, "sinks")])
def test_a_window_or_sinks_are_refused(asked, named):
    with pytest.raises(ConfigError, match=rf"this model asks for {named}$"):
        LatentSequences([4], **asked).attend(DECODE, {0: (3, 4)})


def test_keys_that_are_not_latents_are_refused():
    paged = LatentSequences([4])
    paged.layer = RadixAttention(3, HEAD_DIM + 8, SCALING, 3, layer_id=1)
    with pytest.raises(ConfigError, match=r"this model asks for expanded latents$"):
        paged.attend(DECODE, {0: (3, 4)})
