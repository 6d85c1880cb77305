"""Adapts how SGLang finds log probabilities: on a CPU by our kernel, which writes no row of all tokens' to memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from types import ModuleType
from typing import Any, TypeVar

from sgl_batch.sglang_adapter import bootstrap

with bootstrap.importing():
    import torch
    from sglang.srt.environ import envs
    from sglang.srt.layers.logprob_processor import LogprobResult

# Of how many of the likeliest tokens each row returns log probabilities, and of which tokens besides.
Asked = tuple[Sequence[int], Sequence[list[int] | None]]
_Row = TypeVar("_Row")

# A head is as quick with so many rows as with more.
_FEWEST_ROWS = 64


def adopt_prompt_log_probabilities(model: Any, most_bytes: int, kernels: ModuleType | None) -> None:
    """Let the head of a loaded model make logits of `most_bytes` at a time for the log probabilities of prompts.

    That is in float32, and 64 rows at least. SGLang has 2,048 rows at a time, which four times over are gigabytes where
    a vocabulary is large. A user's SGLANG_LOGPROB_CHUNK_SIZE stands. Log probabilities are found by `kernels`, where
    there are any. Idempotent.
    """
    head: Any = getattr(model, "logits_processor", None)
    processor = getattr(head, "input_logprob_processor", None)
    if processor is None or isinstance(processor, PromptLogProbabilities):
        return
    if not envs.SGLANG_LOGPROB_CHUNK_SIZE.is_set():
        processor.logprobs_chunk_size = max(_FEWEST_ROWS, most_bytes // (4 * head.vocab_size))
    if kernels is not None:
        rows_at_once = processor.logprobs_chunk_size if processor.enable_logprobs_chunk else None
        head.input_logprob_processor = PromptLogProbabilities(kernels, rows_at_once)


def output_log_probabilities(
    kernels: ModuleType,
    logits: torch.Tensor,
    tokens: torch.Tensor,
    asked: Asked,
    temperatures: torch.Tensor | None = None,
) -> Any:
    """Return a LogprobResult of the chosen tokens, int64 [B], and of what each row of logits [B, vocab] `asked` for.

    `temperatures`: float32 [B, 1]. As SGLang's, none is below the least float32.
    """
    tops, named = asked
    over = torch.ones(len(logits)) if temperatures is None else temperatures.flatten().contiguous()
    found = kernels.log_probabilities(logits, tokens, max(tops, default=0), over)
    result = LogprobResult(token_logprobs=_finite(found.of_tokens_T))
    if any(tops):
        values = _finite(found.top_values_TK)
        result.top_logprobs_val = [row[:top] for row, top in zip(values, tops, strict=True)]
        result.top_logprobs_idx = [row[:top] for row, top in zip(found.top_tokens_TK, tops, strict=True)]
    if any(ids is not None for ids in named):
        result.token_ids_logprobs_val = [_finite(own) for own in _of_named(logits, found, named, over)]
        result.token_ids_logprobs_idx = list(named)
    return result


def _finite(values: torch.Tensor) -> torch.Tensor:
    return values.clamp_(min=torch.finfo(values.dtype).min)


class PromptLogProbabilities:
    """What SGLang's InputLogprobProcessor does, by the kernel."""

    def __init__(self, kernels: ModuleType, rows_at_once: int | None) -> None:
        """Let the head make logits of `rows_at_once`; None: of all."""
        self._kernels, self._rows_at_once = kernels, rows_at_once

    def forward(
        self,
        pruned_states: torch.Tensor,
        sample_indices: torch.Tensor,
        input_logprob_indices: torch.Tensor,
        token_to_seq_idx: list[int],
        lm_head: Any,
        get_logits_fn: Callable[..., torch.Tensor],
        logits_metadata: Any,
        skip_chunking_for_dp_attn: bool = False,
    ) -> tuple[Any, torch.Tensor]:
        """Return a LogprobResult of prompts, and the logits of the rows whose next token is sampled.

        Args:
            pruned_states: The hidden states that get logits [R, hidden].
            sample_indices: Which of these rows are sampled from, in ascending order.
            input_logprob_indices: Which of them a prompt's log probability is asked of, in ascending order.
            token_to_seq_idx: The sequence of each row.
            lm_head: As `get_logits_fn` takes it.
            get_logits_fn: Makes logits of some rows.
            logits_metadata: SGLang's LogitsMetadata.
            skip_chunking_for_dp_attn: Whether all rows must be computed at once.
        """
        num_rows, metadata = len(pruned_states), logits_metadata
        tops: Sequence[int] = metadata.top_logprobs_nums if metadata.extend_return_top_logprob else ()
        named: Sequence[list[int] | None] = metadata.token_ids_logprobs if metadata.extend_token_ids_logprob else ()
        tokens_R = torch.zeros(num_rows, dtype=torch.int64)
        given = metadata.extend_input_logprob_token_ids_gpu[: len(input_logprob_indices)]
        tokens_R[input_logprob_indices] = given.to(torch.int64)
        at_once = num_rows if skip_chunking_for_dp_attn else self._rows_at_once or num_rows
        sampled, found, of_named = [], [], []
        for begin in range(0, num_rows, at_once):
            end = min(begin + at_once, num_rows)
            logits = get_logits_fn(pruned_states[begin:end], lm_head, metadata, use_logits_buffer=at_once >= num_rows)
            sampled.append(logits[sample_indices[(sample_indices >= begin) & (sample_indices < end)] - begin])
            found.append(self._kernels.log_probabilities(logits, tokens_R[begin:end], max(tops, default=0)))
            if named:
                ids, over = [named[own] for own in token_to_seq_idx[begin:end]], torch.ones(end - begin)
                of_named += [own.tolist() for own in _of_named(logits, found[-1], ids, over)]
        of_tokens, values, likeliest, *_ = (torch.cat(one)[input_logprob_indices] for one in zip(*found, strict=True))
        result, lengths = LogprobResult(token_logprobs=of_tokens), metadata.extend_logprob_pruned_lens_cpu
        if tops:
            result.top_logprobs_val = _first_by_sequence(values.tolist(), tops, lengths)
            result.top_logprobs_idx = _first_by_sequence(likeliest.tolist(), tops, lengths)
        if named:
            rows = [of_named[row] for row in input_logprob_indices.tolist()]
            parts = [[] if ids is None else own for ids, own in zip(named, _by_sequence(rows, lengths), strict=True)]
            result.token_ids_logprobs_val = parts
            result.token_ids_logprobs_idx = [[ids] * len(part) for ids, part in zip(named, parts, strict=True)]
        return result, torch.cat(sampled)


def _of_named(
    logits: torch.Tensor, found: Any, named: Sequence[list[int] | None], over: torch.Tensor
) -> list[torch.Tensor]:
    """Return the log probabilities of the tokens that each row names, over its temperature."""
    rows = zip(named, logits, found.largest_T, over, found.log_sums_T, strict=True)
    return [(row[ids or []] - largest) / temperature - log_sum for ids, row, largest, temperature, log_sum in rows]


def _by_sequence(rows: Sequence[_Row], lengths: Sequence[int]) -> Iterator[list[_Row]]:
    """Yield the rows of each sequence, none where its length is not above 0."""
    rest = iter(rows)
    for length in lengths:
        yield list(islice(rest, max(length, 0)))


def _first_by_sequence(rows: list[list[Any]], tops: Sequence[int], lengths: Sequence[int]) -> list[list[list[Any]]]:
    """Return, of each of its rows, as many of the first ones as a sequence asks for."""
    return [[row[:top] for row in own] for top, own in zip(tops, _by_sequence(rows, lengths), strict=True)]
