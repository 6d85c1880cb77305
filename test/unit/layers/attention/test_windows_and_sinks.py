"""Attention over a window of the tokens, and with sinks, equals its definition; a row keeps its bits."""

from __future__ import annotations

import pytest
import torch
from paged_sequences import PagedSequences
from sglang.srt.model_executor.forward_batch_info import ForwardMode

DECODE, EXTEND = ForwardMode.DECODE, ForwardMode.EXTEND
native_only = pytest.mark.parametrize("operators", ["native"], indirect=True)
# window, sinks
FORMS = [(2, False), (64, False), (0, True), (20, True), (65, True), (5000, True)]


def close(result: torch.Tensor, expected: torch.Tensor, tolerance: float) -> bool:
    return torch.allclose(result.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.01)], ids=str)
@pytest.mark.parametrize("page_size", [8, 64])
@pytest.mark.parametrize(("window", "sinks"), FORMS)
def test_decode_and_prefill_behind_prefixes_equal_dense_attention(window, sinks, page_size, dtype, tolerance):
    prefixes, news = [0, 1, page_size, 500, 63, 300], [3, page_size, 1, 100, 130, 1]
    spans = {row: (start, start + new) for row, (start, new) in enumerate(zip(prefixes, news, strict=True))}
    ends = [end for _, end in spans.values()]
    paged = PagedSequences(ends, page_size=page_size, dtype=dtype, groups=4, window=window, sinks=sinks)
    paged.write(prefixes)
    assert close(paged.attend(EXTEND, spans), paged.expected(spans), tolerance)
    lasts = {row: (end - 1, end) for row, end in enumerate(ends)}
    assert close(paged.attend(DECODE, lasts), paged.expected(lasts), tolerance)


@native_only
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("window", "sinks"), FORMS)
def test_a_row_has_the_same_bits_however_its_prompt_is_chunked(window, sinks, dtype):
    total = 150
    paged = PagedSequences([total, 3], dtype=dtype, window=window, sinks=sinks)
    whole = paged.attend(EXTEND, {0: (0, total)})
    for size in (1, 7, 64, 149):
        cuts = [(start, min(start + size, total)) for start in range(0, total, size)]
        parts = [paged.attend(DECODE if end - start == 1 else EXTEND, {0: (start, end)}) for start, end in cuts]
        assert torch.equal(torch.cat(parts), whole), f"chunks of {size}"
