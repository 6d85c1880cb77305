"""Adapts SGLang's decode batches for passes that verify drafts: one row for each position, and a step for each row.

A pass over drafts has the form of a decode pass, in which a request has several rows, with one token more each. Their
KV is written before attention reads it, so that each row's result is that of a step of its own. SGLang then processes
the results as those of as many steps.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from sgl_batch.sglang_adapter import bootstrap
from sgl_batch.sglang_adapter.host_copies import upload
from sgl_batch.sglang_adapter.scheduling import make_repeatable, new_batch, uses_penalties
from sgl_batch.sglang_adapter.types.batches import BatchResult, ScheduleBatch
from sgl_batch.sglang_adapter.types.scheduler import SGLangScheduler

with bootstrap.importing():
    import torch
    from sglang.srt.managers.overlap_utils import RelayPayload
    from sglang.srt.model_executor.forward_batch_info import ForwardMode
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

# With any of these, a result belongs to one step, or a step depends on more than the tokens before it.
_ONE_STEP = (
    "return_logprob",
    "return_hidden_states",
    "return_sampling_mask",
    "return_routed_experts",
    "return_indexer_topk",
    "grammar",
    "custom_logit_processor",
    "lora_id",
    "session",
    "input_embeds",
    "positional_embed_overrides",
    "multimodal_inputs",
    "to_finish",
)


def can_verify(batch: ScheduleBatch) -> bool:
    """Return whether all results of a decode batch's rows are their sampled tokens, which depend on tokens alone."""
    return not uses_penalties(batch) and not any(
        getattr(request, name, None) for request in batch.reqs for name in _ONE_STEP
    )


def verifying_batch(scheduler: SGLangScheduler, batch: ScheduleBatch, drafts: Sequence[Sequence[int]]) -> ScheduleBatch:
    """Make the batch of a pass over the next tokens of a decode batch's requests, and over drafts of those after them.

    Args:
        scheduler: SGLang's scheduler.
        batch: a decode batch of B requests, prepared for its next step. It is not changed.
        drafts: [B]; the drafts of a request fit in the page of its next token.

    Returns:
        A decode batch with rows in the order of the requests: each request's next token, then its drafts.
    """
    owners = [row for row, own in enumerate(drafts) for _ in range(1 + len(own))]
    ahead = [number for own in drafts for number in range(1 + len(own))]
    index, offset = (upload(one, torch.int64, batch.device) for one in (owners, ahead))
    index_cpu, offset_cpu = torch.tensor(owners), torch.tensor(ahead)
    wide = new_batch(scheduler, [batch.reqs[row] for row in owners])
    wide.forward_mode = ForwardMode.DECODE
    wide.multimodal_inputs = [None] * len(owners)
    wide.req_pool_indices = batch.req_pool_indices[index]
    wide.req_pool_indices_cpu = batch.req_pool_indices_cpu[index_cpu]
    wide.seq_lens = batch.seq_lens[index] + offset
    wide.seq_lens_cpu = batch.seq_lens_cpu[index_cpu] + offset_cpu
    wide.orig_seq_lens = wide.seq_lens.to(torch.int32)
    wide.out_cache_loc = batch.out_cache_loc[index] + offset
    table = scheduler.req_to_token_pool.req_to_token
    table[wide.req_pool_indices, wide.seq_lens - 1] = wide.out_cache_loc.to(table.dtype)
    tokens = [
        token for request, own in zip(batch.reqs, drafts, strict=True) for token in (request.output_ids[-1], *own)
    ]
    wide.input_ids = upload(tokens, torch.int64, batch.device)
    wide.sampling_info = SamplingBatchInfo.from_schedule_batch(wide, scheduler.model_config.vocab_size)
    make_repeatable(wide)
    return wide


def step_result(
    scheduler: SGLangScheduler, batch: ScheduleBatch, result: BatchResult, tokens: Sequence[int]
) -> BatchResult:
    """Return the result of one step of a decode batch, of a pass that verified drafts.

    Args:
        scheduler: SGLang's scheduler; its next step begins with these tokens.
        batch: a decode batch of B requests.
        result: of the pass.
        tokens: the tokens of the step [B].
    """
    step = copy.copy(result)
    step.next_token_ids = upload(tokens, torch.int64, scheduler.device)
    scheduler.future_map.stash(batch.req_pool_indices, RelayPayload(bonus_tokens=step.next_token_ids))
    return step


def begin_verified_step(batch: ScheduleBatch, rows: Sequence[int]) -> ScheduleBatch:
    """Begin the next step of some requests of a decode batch, whose KV a pass over drafts has written.

    Args:
        batch: a decode batch after a step, changed in place: these requests have one token more.
        rows: which of its requests.

    Returns:
        What the processing of results needs of these requests.
    """
    index, index_cpu = upload(rows, torch.int64, batch.device), torch.tensor(rows)
    batch.seq_lens = batch.seq_lens.index_add(0, index, torch.ones_like(index))
    batch.seq_lens_cpu = batch.seq_lens_cpu.index_add(0, index_cpu, torch.ones_like(index_cpu))
    batch.orig_seq_lens = batch.seq_lens.to(torch.int32)
    batch.seq_lens_sum = None
    step: Any = batch.copy()
    step.reqs = [batch.reqs[row] for row in rows]
    step.req_pool_indices = batch.req_pool_indices[index]
    step.seq_lens_cpu = batch.seq_lens_cpu[index_cpu]
    for request in step.reqs:
        request.decode_batch_idx += 1
        request.kv_committed_len += 1
        request.kv.kv_allocated_len += 1
    made: ScheduleBatch = step
    return made
