"""Attention of the last rows of a batch's prompts alone gives these rows' bits, and writes the KV of all."""

from __future__ import annotations

import itertools

import pytest
import torch
from paged_sequences import LatentSequences, PagedSequences
from sglang.srt.model_executor.forward_batch_info import ForwardMode

PREFIXES, NEWS, COUNTS = [0, 1, 8, 50, 3], [3, 8, 1, 40, 70], [1, 2, 1, 0, 70]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("sequences", "options"),
    [(PagedSequences, {}), (PagedSequences, {"window": 20, "sinks": True}), (LatentSequences, {})],
)
def test_the_kept_rows_have_the_bits_that_they_have_among_all(sequences, options, dtype, operators):
    ends = [start + new for start, new in zip(PREFIXES, NEWS, strict=True)]
    spans = {row: (start, end) for row, (start, end) in enumerate(zip(PREFIXES, ends, strict=True))}
    whole, part = (sequences(ends, dtype=dtype, **options) for _ in range(2))
    for paged in (whole, part):
        paged.write(PREFIXES)
    expected = whole.attend(ForwardMode.EXTEND, spans)
    ends_of_rows = itertools.accumulate(NEWS)
    lasts = [torch.arange(end - count, end) for end, count in zip(ends_of_rows, COUNTS, strict=True)]

    batch = part.batch(ForwardMode.EXTEND, spans)
    part.backend.init_forward_metadata(batch)
    metadata = part.backend.forward_metadata
    part.backend.forward_metadata = part.backend.of_last_rows(metadata, COUNTS, torch.cat(lasts))
    sinks = {} if part.sinks is None else {"sinks": part.sinks}
    attended = part.backend.forward_extend(*part.rows(spans), part.layer, batch, **sinks)

    if operators == "torch":
        assert part.backend.forward_metadata is metadata, "without native kernels all rows attend"
        assert torch.equal(attended, expected)
    else:
        assert torch.equal(attended, torch.cat([expected[rows] for rows in lasts]))
    for mine, others in zip(part.pool.all_parts, whole.pool.all_parts, strict=True):
        assert torch.equal(mine, others)
