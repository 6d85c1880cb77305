"""SGLang's head reads the same rows of a batch of prompts, and of a batch of the rows that it has logits of."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import sgl_batch_kernel
import torch
from sglang.srt.layers.logits_processor import LogitsMetadata, LogitsProcessor
from sglang.srt.layers.logprob_processor import InputLogprobProcessor
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode

from sgl_batch.sglang_adapter.log_probabilities import PromptLogProbabilities, adopt_prompt_log_probabilities
from sgl_batch.sglang_adapter.logits_rows import batch_of_rows, rows_with_logits

LENGTHS = [4, 5, 6, 1, 9]


def batch_of(starts: list[int] | None, mode: ForwardMode = ForwardMode.EXTEND) -> ForwardBatch:
    """A batch of prompts of LENGTHS. `starts`: where log probabilities of each begin; None asks for none."""
    lengths = torch.tensor(LENGTHS)
    batch = ForwardBatch(
        forward_mode=mode,
        batch_size=len(LENGTHS),
        input_ids=torch.arange(sum(LENGTHS)),
        req_pool_indices=torch.arange(len(LENGTHS)),
        seq_lens=lengths,
        out_cache_loc=torch.arange(sum(LENGTHS)),
        seq_lens_sum=sum(LENGTHS),
        capture_hidden_mode=CaptureHiddenMode.NULL,
    )
    batch.extend_seq_lens, batch.extend_seq_lens_cpu = lengths, LENGTHS
    batch.return_logprob = starts is not None
    batch.extend_logprob_start_lens_cpu = starts
    batch.top_logprobs_nums, batch.token_ids_logprobs = [2, 0, 0, 0, 1], [None] * len(LENGTHS)
    return batch


def read(hidden: torch.Tensor, batch: ForwardBatch) -> list[object]:
    """The rows that the head makes logits of, and all numbers by which it finds its way among them."""
    metadata = LogitsMetadata.from_forward_batch(batch)
    rows, _, _, *indices = LogitsProcessor._get_pruned_states(None, hidden, None, None, metadata)
    found = [rows.tolist(), *(index.tolist() if isinstance(index, torch.Tensor) else index for index in indices)]
    return [*found, metadata.extend_return_logprob, metadata.extend_logprob_pruned_lens_cpu]


@pytest.mark.parametrize("starts", [None, LENGTHS, [0] * 5, [0, 5, 3, 1, 8], [4, 5, 6, 0, 9], [3, 0, 6, 1, 2]], ids=str)
def test_the_head_reads_the_same_rows_and_numbers(starts):
    batch, hidden = batch_of(starts), torch.randn(sum(LENGTHS), 3)
    counts = rows_with_logits(batch)
    ends = list(itertools.accumulate(LENGTHS))
    kept = torch.cat([hidden[end - count : end] for end, count in zip(ends, counts, strict=True)])
    narrow = batch_of_rows(batch, counts)
    assert read(kept, narrow) == read(hidden, batch)
    assert len(kept) == sum(max(1, n - s) for n, s in zip(LENGTHS, starts or LENGTHS, strict=True))
    assert narrow.extend_seq_lens.tolist() == narrow.extend_seq_lens_cpu == counts
    assert batch.extend_seq_lens_cpu is LENGTHS, "the batch itself stays as it is"


def test_all_rows_are_read_where_hidden_states_or_scores_between_items_are_asked_for_and_in_decode():
    hidden, items = batch_of(None), batch_of(None)
    hidden.capture_hidden_mode = CaptureHiddenMode.FULL
    items.multi_item_delimiter_indices = [torch.tensor([1])] * len(LENGTHS)
    for batch in (hidden, items, batch_of(None, ForwardMode.DECODE)):
        assert rows_with_logits(batch) is None
    assert rows_with_logits(batch_of(None)) == [1] * len(LENGTHS)


def logprobs_by(processor: Any, starts: list[int]) -> tuple[object, ...]:
    """Log probabilities of a batch, and the logits that are sampled from."""
    batch = batch_of(starts)
    batch.token_ids_logprobs = [None, [3, 1], None, [0], [8, 9, 2]]
    metadata = LogitsMetadata.from_forward_batch(batch)
    hidden, head = torch.randn(sum(LENGTHS), 3, generator=torch.Generator().manual_seed(0)), torch.ones(3, 10).cumsum(1)
    metadata.extend_input_logprob_token_ids_gpu = (
        torch.arange(sum(n - s for n, s in zip(LENGTHS, starts, strict=True))) % 10
    )
    rows, _, _, *indices = LogitsProcessor._get_pruned_states(None, hidden, None, None, metadata)
    found, sampled = processor.forward(rows, *indices, None, lambda some, *_, **__: torch.cos(some @ head), metadata)
    return *vars(found).values(), sampled


def sglangs(rows_at_once: int) -> InputLogprobProcessor:
    processor = InputLogprobProcessor()
    processor.logprobs_chunk_size = rows_at_once
    return processor


def by_kernel(rows_at_once: int | None) -> PromptLogProbabilities:
    return PromptLogProbabilities(sgl_batch_kernel, rows_at_once)


@pytest.mark.parametrize("starts", [[0] * 5, [0, 5, 3, 1, 8], [4, 5, 6, 0, 9], [3, 0, 6, 1, 2]], ids=str)
@pytest.mark.parametrize("rows_at_a_time", [1, 2, 3, 5, 8, 24])
@pytest.mark.parametrize("way", [sglangs, by_kernel])
def test_log_probabilities_do_not_depend_on_how_many_rows_the_head_takes_at_a_time(way, rows_at_a_time, starts):
    whole = logprobs_by(way(1000), starts)
    for part, expected in zip(logprobs_by(way(rows_at_a_time), starts), whole, strict=True):
        if isinstance(expected, torch.Tensor):
            torch.testing.assert_close(part, expected)
        else:
            assert part == expected


@pytest.mark.parametrize("starts", [[0] * 5, [0, 5, 3, 1, 8], [4, 5, 6, 0, 9], [3, 0, 6, 1, 2]], ids=str)
@pytest.mark.parametrize("rows_at_a_time", [3, None])
def test_the_kernels_log_probabilities_are_sglangs(rows_at_a_time, starts):
    found, expected = logprobs_by(by_kernel(rows_at_a_time), starts), logprobs_by(sglangs(1000), starts)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("vocab_size", "rows"), [(1000, 20_971), (32_000, 655), (151_936, 138), (1_000_000, 64)])
def test_a_head_takes_as_many_rows_at_a_time_as_their_logits_have_room(monkeypatch, vocab_size, rows):
    def limited() -> int:
        model = SimpleNamespace(
            logits_processor=SimpleNamespace(vocab_size=vocab_size, input_logprob_processor=InputLogprobProcessor())
        )
        adopt_prompt_log_probabilities(model, 80 << 20, None)
        return model.logits_processor.input_logprob_processor.logprobs_chunk_size

    assert limited() == rows
    monkeypatch.setenv("SGLANG_LOGPROB_CHUNK_SIZE", "9")
    assert limited() == 9, "a user's own number of rows stands"
    adopt_prompt_log_probabilities(SimpleNamespace(), 80 << 20, None)  # a model without such a head
