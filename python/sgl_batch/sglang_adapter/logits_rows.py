"""Adapts what SGLang's head reads of a batch of prompts: the rows that have logits, and a batch of these alone."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from sgl_batch.sglang_adapter import bootstrap
from sgl_batch.sglang_adapter.host_copies import upload
from sgl_batch.sglang_adapter.types.batches import ForwardBatch

with bootstrap.importing():
    import torch
    from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardMode


def rows_with_logits(batch: ForwardBatch) -> list[int] | None:
    """Return of how many of its last rows each sequence of a batch has logits, one at least.

    None where all rows of the batch are read: in decode, and where somebody asks for hidden states.
    """
    given: Any = batch
    if given.forward_mode != ForwardMode.EXTEND or given.capture_hidden_mode not in (None, CaptureHiddenMode.NULL):
        return None
    if given.multi_item_delimiter_indices is not None or batch.extend_seq_lens_cpu is None:
        return None
    if not batch.return_logprob:
        return [1] * len(batch.extend_seq_lens_cpu)
    # A sequence without log probabilities of its prompt starts them at its end, and one token is sampled all the same.
    starts: list[int] = given.extend_logprob_start_lens_cpu
    return [max(1, length - start) for length, start in zip(batch.extend_seq_lens_cpu, starts, strict=True)]


def batch_of_rows(batch: ForwardBatch, counts: Sequence[int]) -> ForwardBatch:
    """Return a batch for SGLang's head that has only the rows of `rows_with_logits`: `counts` of each sequence."""
    part: Any = copy.copy(batch)
    if batch.return_logprob:
        wanted = zip(batch.extend_seq_lens_cpu or (), part.extend_logprob_start_lens_cpu, counts, strict=True)
        part.extend_logprob_start_lens_cpu = [count - (length - start) for length, start, count in wanted]
    part.extend_seq_lens_cpu = list(counts)
    part.extend_seq_lens = upload(counts, torch.int64, batch.seq_lens.device)
    rows: ForwardBatch = part
    return rows
