"""Adapts SGLang's forward batch for trial steps: decode batches of sequences that do not exist."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sgl_batch.sglang_adapter import bootstrap
from sgl_batch.sglang_adapter.types.batches import ForwardBatch

with bootstrap.importing():
    import torch
    from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardMode
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch as SGLangForwardBatch

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
