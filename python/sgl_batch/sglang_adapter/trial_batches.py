"""Adapts SGLang's forward batch for trial passes of sequences that do not exist, and starts a lone model runner."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from sgl_batch.sglang_adapter import bootstrap
from sgl_batch.sglang_adapter.types.batches import ForwardBatch

with bootstrap.importing():
    import torch
    from sglang.srt.distributed.parallel_state_wrapper import ParallelState
    from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardMode
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch as SGLangForwardBatch
    from sglang.srt.server_args import set_global_server_args_for_scheduler

if TYPE_CHECKING:
    from sgl_batch.sglang_adapter.forward import ModelRunner


def trial_decode_batch(
    runner: ModelRunner, input_ids: torch.Tensor, kv_indices: torch.Tensor, rows: torch.Tensor, position: int
) -> ForwardBatch:
    """Make a decode step of sequences that each have `position` tokens with KV.

    `input_ids`: their next tokens; `kv_indices`: where the KV of these is written; `rows`: their request slots. All are
    [B], int64, on the runner's device.
    """
    lengths = torch.full_like(rows, position + 1)
    made: ForwardBatch = SGLangForwardBatch(
        forward_mode=ForwardMode.DECODE,
        batch_size=len(rows),
        input_ids=input_ids,
        req_pool_indices=rows,
        seq_lens=lengths,
        seq_lens_cpu=torch.full((len(rows),), position + 1),
        seq_lens_sum=len(rows) * (position + 1),
        orig_seq_lens=lengths.to(torch.int32),
        out_cache_loc=kv_indices,
        positions=torch.full_like(rows, position),
        return_logprob=False,
        capture_hidden_mode=CaptureHiddenMode.NULL,
        spec_algorithm=runner.spec_algorithm,
    )
    return made


def trial_prefill_batch(
    runner: ModelRunner, input_ids: torch.Tensor, lengths: Sequence[int], kv_indices: torch.Tensor
) -> ForwardBatch:
    """Return a prefill group of whole prompts of `lengths` tokens.

    `input_ids` and `kv_indices` are those of all prompts, one after the other [tokens], int64, on the runner's device.
    Prompt number i has row i + 1 of the request table, where the caller has written the KV indices of its tokens.
    """
    device, total = kv_indices.device, sum(lengths)
    ends = torch.tensor(lengths, device=device)
    made: ForwardBatch = SGLangForwardBatch(
        forward_mode=ForwardMode.EXTEND,
        batch_size=len(lengths),
        input_ids=input_ids,
        req_pool_indices=torch.arange(1, len(lengths) + 1, device=device),
        seq_lens=ends,
        seq_lens_cpu=torch.tensor(lengths),
        seq_lens_sum=total,
        orig_seq_lens=ends.to(torch.int32),
        out_cache_loc=kv_indices,
        positions=torch.cat([torch.arange(length, device=device) for length in lengths]),
        extend_num_tokens=total,
        extend_seq_lens=ends,
        extend_seq_lens_cpu=list(lengths),
        extend_prefix_lens=torch.zeros_like(ends),
        extend_prefix_lens_cpu=[0] * len(lengths),
        extend_start_loc=torch.cumsum(ends, 0) - ends,
        return_logprob=False,
        capture_hidden_mode=CaptureHiddenMode.NULL,
        spec_algorithm=runner.spec_algorithm,
    )
    return made


def begin_lone_rank(server_args: Any) -> Any:
    """Make `server_args` those of this process, as a scheduler does; return the parallel state of a lone rank."""
    set_global_server_args_for_scheduler(server_args)
    return ParallelState.trivial(gpu_id=0)
