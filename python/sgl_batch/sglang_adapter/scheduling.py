"""Adapts SGLang's scheduler and its batches for our managers. All writes to their attributes are in this module.

SGLang's scheduler decides itself which requests run. Ours makes the batches that our core decides: it builds SGLang's
batch objects, moves requests in and out of them, and takes and gives request slots and KV.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from http import HTTPStatus
from typing import Any, TypeGuard

from sgl_batch.sglang_adapter import bootstrap
from sgl_batch.sglang_adapter.expert_choice import attach_expert_choices
from sgl_batch.sglang_adapter.host_copies import upload
from sgl_batch.sglang_adapter.sampling_rows import keep_rows_on_host
from sgl_batch.sglang_adapter.types.batches import BatchResult, ScheduleBatch
from sgl_batch.sglang_adapter.types.messages import WeightsUpdate
from sgl_batch.sglang_adapter.types.requests import Request
from sgl_batch.sglang_adapter.types.scheduler import SGLangScheduler

with bootstrap.importing():
    import torch
    from sglang.srt.environ import envs
    from sglang.srt.managers.io_struct import (
        BatchTokenizedGenerateReqInput,
        ContinueGenerationReqInput,
        DestroyWeightsUpdateGroupReqInput,
        FlushCacheReqInput,
        GetInternalStateReqOutput,
        InitWeightsUpdateGroupReqInput,
        PauseGenerationReqInput,
        SetInternalStateReqOutput,
        TokenizedGenerateReqInput,
        UpdateWeightFromDiskReqInput,
        UpdateWeightsFromDistributedReqInput,
        UpdateWeightsFromIPCReqInput,
        UpdateWeightsFromTensorReqInput,
    )
    from sglang.srt.managers.overlap_utils import RelayPayload
    from sglang.srt.managers.schedule_batch import FINISH_ABORT, NextBatchPlan
    from sglang.srt.managers.schedule_batch import ScheduleBatch as SGLangBatch
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.managers.scheduler_components.metrics_reporter import PrefillStats, QueueCount
    from sglang.srt.mem_cache.common import release_kv_cache
    from sglang.srt.model_executor.forward_batch_info import ForwardMode
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

__all__ = [
    "GetInternalStateReqOutput",
    "NextBatchPlan",
    "Scheduler",
    "SetInternalStateReqOutput",
    "await_input",
    "brings_only_requests",
    "clear_batch",
    "copy_results_to_host",
    "decode_batch",
    "decode_batches",
    "detach",
    "drop_last_steps",
    "end_aborted",
    "end_detached",
    "end_retraction",
    "free_kv",
    "intercept_controls",
    "keep_prefix",
    "limits_request_time",
    "make_repeatable",
    "mark_aborted",
    "merge_into",
    "needs_whole_prompt",
    "new_batch",
    "prefill_batch",
    "protect_prefix",
    "retract",
    "rows_of",
    "set_max_new_tokens",
    "set_prefix",
    "shares_prefix",
    "silence",
    "skip_ended_rows",
    "tokens_written",
    "updates_weights",
    "uses_penalties",
]

# Requests to the whole engine, not to one of its processes.
_WEIGHT_UPDATES = (
    UpdateWeightFromDiskReqInput,
    UpdateWeightsFromDistributedReqInput,
    UpdateWeightsFromIPCReqInput,
    UpdateWeightsFromTensorReqInput,
)
_CONTROLS = (
    *_WEIGHT_UPDATES,
    ContinueGenerationReqInput,
    DestroyWeightsUpdateGroupReqInput,
    FlushCacheReqInput,
    InitWeightsUpdateGroupReqInput,
    PauseGenerationReqInput,
)

# With any of these, a prompt's KV depends on more than its tokens, or the request needs a result for each token.
_OWN_PROMPT = (
    "input_embeds",
    "positional_embed_overrides",
    "multimodal_inputs",
    "lora_id",
    "session",
    "return_hidden_states",
    "return_indexer_topk",
    "to_finish",
)


def new_batch(scheduler: SGLangScheduler, requests: list[Request]) -> ScheduleBatch:
    """Make a batch of requests whose tensors the caller sets."""
    batch: ScheduleBatch = SGLangBatch.init_new(
        requests,
        scheduler.req_to_token_pool,
        scheduler.token_to_kv_pool_allocator,
        scheduler.tree_cache,
        scheduler.model_config,
        False,
        scheduler.spec_algorithm,
    )
    return batch


def make_repeatable(batch: ScheduleBatch) -> None:
    """Give the sampler each row's seed and parameters, and penalties a fixed order.

    SGLang itself sets seeds only in its deterministic mode, and keeps penalties in a set of classes, whose order
    differs from process to process.
    """
    orchestrator = batch.sampling_info.penalizer_orchestrator
    orchestrator.penalizers = dict(sorted(orchestrator.penalizers.items(), key=lambda item: item[0].__name__))
    seeds = [request.sampling_params.sampling_seed or 0 for request in batch.reqs]
    batch.sampling_info.sampling_seed = upload(seeds, torch.int64, batch.device)
    keep_rows_on_host(batch)


def intercept_controls(
    scheduler: SGLangScheduler, carry_out: Callable[[Callable[[object], object], object], object]
) -> None:
    """Let requests to the whole engine be handled by `carry_out(SGLang's handler, request)`."""
    handlers = scheduler._request_dispatcher._mapping
    for kind in _CONTROLS:
        handlers[kind] = partial(carry_out, handlers[kind])


def updates_weights(asked: object) -> TypeGuard[WeightsUpdate]:
    """Return whether a request to the engine changes its weights."""
    return isinstance(asked, _WEIGHT_UPDATES)


def brings_only_requests(message: object) -> bool:
    """Return whether a message only adds requests to the queue."""
    return isinstance(message, (TokenizedGenerateReqInput, BatchTokenizedGenerateReqInput))


def prefill_batch(scheduler: SGLangScheduler, requests: list[Request], ends: Mapping[str, int]) -> ScheduleBatch:
    """Make a batch that prefills `requests`, with KV indices for all their tokens.

    `ends`: by request id, the end of the computed tokens, for a request that is not computed whole; it gives no token
    yet. A retracted request is computed up to its last generated token, from which decode continues.
    """
    for request in requests:
        if not len(request.prefix_indices):
            request.init_next_round_input(scheduler.tree_cache)
        tokens = len(request.origin_input_ids) + max(len(request.output_ids) - 1, 0)
        end = ends.get(request.rid, tokens)
        request.set_extend_range(len(request.prefix_indices), end)
        request.inflight_middle_chunks = int(end < tokens)
    batch = new_batch(scheduler, requests)
    batch.prepare_for_extend()
    for request in requests:
        request.is_retracted = len(request.output_ids) > 0  # tells SGLang that this pass gives it no token
    batch.prefill_stats = PrefillStats(
        log_input_tokens=batch.extend_num_tokens,
        log_hit_tokens=sum(batch.prefix_lens),
        new_token_ratio=1.0,
        num_running_reqs=QueueCount.from_reqs(scheduler.running_batch.reqs, False),
        num_new_seqs=len(requests),
    )
    make_repeatable(batch)
    return batch


def decode_batch(scheduler: SGLangScheduler, requests: list[Request]) -> ScheduleBatch:
    """Make a decode batch of requests that are prefilled and have at least one token, in this order."""
    batch = new_batch(scheduler, requests)
    device = batch.device
    lengths = [request.kv_committed_len for request in requests]
    batch.forward_mode = ForwardMode.DECODE
    slots = [request.req_pool_idx for request in requests if request.req_pool_idx is not None]
    assert len(slots) == len(requests), "each decode row has a request slot"
    batch.req_pool_indices_cpu = torch.tensor(slots)
    batch.req_pool_indices = upload(slots, torch.int64, device)
    batch.seq_lens_cpu = torch.tensor(lengths)
    batch.seq_lens = upload(lengths, torch.int64, device)
    batch.orig_seq_lens = upload(lengths, torch.int32, device)
    batch.multimodal_inputs = [None] * len(requests)
    if batch.return_logprob:
        batch.top_logprobs_nums = [request.logprob.top_logprobs_num for request in requests]
        batch.token_ids_logprobs = [request.logprob.token_ids_logprob for request in requests]
    batch.sampling_info = SamplingBatchInfo.from_schedule_batch(batch, scheduler.model_config.vocab_size)
    _recall_penalties(batch)
    make_repeatable(batch)
    last_tokens = upload([request.output_ids[-1] for request in requests], torch.int64, device)
    scheduler.future_map.stash(batch.req_pool_indices, RelayPayload(bonus_tokens=last_tokens))
    return batch


def _recall_penalties(batch: ScheduleBatch) -> None:
    """Count the tokens generated so far for penalties; a sequence's next step counts its last token.

    SGLang counts one token of every sequence at a time, so that sequences of different lengths need batches of one.
    """
    orchestrator = batch.sampling_info.penalizer_orchestrator
    longest = max(len(request.output_ids) for request in batch.reqs)
    if longest == 1 or not orchestrator.is_required:
        return
    assert len(batch.reqs) == 1, "sequences that go on with penalties join one by one"
    for token in batch.reqs[0].output_ids[:-1]:
        orchestrator.cumulate_output_tokens(upload([token], torch.int64, batch.device))


def decode_batches(scheduler: SGLangScheduler, requests: list[Request]) -> Iterator[ScheduleBatch]:
    """Yield decode batches for requests that join: one by one for those with penalties and several tokens."""
    fresh = [request for request in requests if len(request.output_ids) == 1]
    resumed = [request for request in requests if len(request.output_ids) > 1]
    plain = [request for request in resumed if not _penalised(request)]
    for together in (fresh, plain, *([request] for request in resumed if _penalised(request))):
        if together:
            yield decode_batch(scheduler, together)


def _penalised(request: Request) -> bool:
    parameters = request.sampling_params
    return bool(
        parameters.frequency_penalty
        or parameters.presence_penalty
        or parameters.repetition_penalty != 1.0
        or parameters.min_new_tokens
    )


def rows_of(batch: ScheduleBatch) -> list[tuple[Request, int, int]]:
    """Return the rows of a computed batch in order: each request, its first position, and its number of rows."""
    if batch.forward_mode.is_extend():
        return list(zip(batch.reqs, batch.prefix_lens, batch.extend_lens, strict=True))
    return [(request, tokens_written(request), 1) for request in batch.reqs]


def tokens_written(request: Request) -> int:
    """Return how many tokens of a prefilled request have KV from processed passes; a step may be under way."""
    return len(request.origin_input_ids) + len(request.output_ids) - 1


def skip_ended_rows(scheduler: SGLangScheduler) -> None:
    """Let SGLang skip rows whose requests ended while the step was under way."""
    processor: Any = scheduler.batch_result_processor
    scheduler.batch_result_processor = replace(processor, enable_overlap=True)


def limits_request_time() -> bool:
    """Return whether SGLang aborts a request after some time, which ranks measure for themselves."""
    return bool(envs.SGLANG_REQ_RUNNING_TIMEOUT.get() > 0)


def silence(scheduler: SGLangScheduler, is_replica: Callable[[str], bool]) -> None:
    """Let no results of steps be answered for the requests whose `is_replica(id)` is true."""
    processor: Any = scheduler.batch_result_processor
    streamer = _OwnersStreamer(processor.output_streamer, is_replica)
    scheduler.batch_result_processor = replace(processor, output_streamer=streamer)


class _OwnersStreamer:
    """SGLang's output streamer, but for replicas, whose owners answer."""

    def __init__(self, streamer: Any, is_replica: Callable[[str], bool]) -> None:
        self._streamer, self._is_replica = streamer, is_replica

    def stream_output(self, reqs: list[Request], *args: Any, **kwargs: Any) -> None:
        owned = [request for request in reqs if not self._is_replica(request.rid)]
        if owned or not reqs:
            self._streamer.stream_output(owned, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._streamer, name)


def uses_penalties(batch: ScheduleBatch) -> bool:
    """Return whether a batch has penalties, so that preparing a step needs the tokens of the step before."""
    return bool(batch.sampling_info.penalizer_orchestrator.is_required)


def drop_last_steps(running: ScheduleBatch) -> None:
    """Remove from a decode batch whose step is under way the requests that have ended, or end with it by length."""
    running.filter_batch(keep_indices=[row for row, request in enumerate(running.reqs) if not _ends(request)])


def _ends(request: Request) -> bool:
    """Return whether a request's next token is its last, whichever token that is, or it has ended already."""
    last = len(request.output_ids) + 1 >= request.sampling_params.max_new_tokens
    return bool(request.finished() or request.to_finish is not None or last)


def copy_results_to_host(batch: ScheduleBatch, result: BatchResult) -> torch.Event:
    """Begin to copy a step's results to the host, after the step and before the next; SGLang waits for the copies.

    Returns the event of their end.
    """
    done: torch.Event = torch.get_device_module(batch.device).Event()
    result.copy_done = done
    result.copy_to_cpu(return_logprob=batch.return_logprob, return_hidden_states=batch.return_hidden_states)
    result.logits_output.next_token_logits = None  # frees [B, vocab], which is not used any more
    return done


def keep_prefix(scheduler: SGLangScheduler, request: Request) -> None:
    """Let a request whose prompt is computed in part continue after that part, with the KV indices that it has."""
    if request.req_pool_idx is not None:
        scheduler.tree_cache.cache_unfinished_req(request, chunked=True)


def end_retraction(batch: ScheduleBatch) -> tuple[int, int]:
    """End the retraction of a prefill's requests; return how many were retracted, and their computed tokens."""
    rows = [length for request, length in zip(batch.reqs, batch.extend_lens, strict=True) if request.is_retracted]
    for request in batch.reqs:
        request.is_retracted = False
    return len(rows), sum(rows)


def retract(scheduler: SGLangScheduler, request: Request) -> None:
    """Free all KV that a request owns or has found. It keeps its generated tokens and their log probabilities."""
    if request.req_pool_idx is not None:
        release_kv_cache(request, scheduler.tree_cache, is_insert=False)
    elif len(request.prefix_indices):
        scheduler.token_to_kv_pool_allocator.free(request.prefix_indices[request.cache_protected_len :])
    request.reset_for_retract()
    if request.output_ids:
        request.logprob_start_len = -1  # the prompt's log probabilities are there already


def clear_batch(running: ScheduleBatch) -> None:
    """Remove all requests from a decode batch."""
    running.filter_batch(keep_indices=[])


def merge_into(running: ScheduleBatch, joining: ScheduleBatch) -> ScheduleBatch:
    """Combine two decode batches; the running one comes first."""
    if running.is_empty():
        return joining
    running.merge_batch(joining)
    return running


def set_prefix(request: Request, scheduler: SGLangScheduler, kv_indices: torch.Tensor, shared_tokens: int) -> None:
    """Let `request` begin after tokens with KV at `kv_indices`. It does not own the KV of the first `shared_tokens`."""
    request.init_next_round_input(scheduler.tree_cache)
    request.prefix_indices = kv_indices
    request.cache_protected_len = shared_tokens


def protect_prefix(request: Request, shared_tokens: int) -> None:
    """Keep a finished request from freeing the KV of its first `shared_tokens` tokens."""
    request.cache_protected_len = shared_tokens


def mark_aborted(request: Request, why: str | None = None) -> None:
    """Let a request that holds KV finish as aborted after its next step, which frees its KV.

    A request that has ended already, for example by its grammar, keeps that reason.
    """
    if not request.finished() and request.to_finish is None:
        request.to_finish = (
            FINISH_ABORT() if why is None else FINISH_ABORT(why, HTTPStatus.BAD_REQUEST, "BadRequestError")
        )


def end_aborted(scheduler: SGLangScheduler, request: Request) -> None:
    """End a request that holds KV outside any batch: free its KV, and answer with its generated tokens."""
    mark_aborted(request)
    request.update_finish_state()
    attach_expert_choices(request)
    release_kv_cache(request, scheduler.tree_cache)
    request.time_stats.set_completion_time()
    scheduler.output_streamer.stream_output([request], request.return_logprob)


def detach(scheduler: SGLangScheduler, request: Request) -> None:
    """Free a request's request slot. Its KV lies elsewhere, and no KV indices are freed."""
    scheduler.req_to_token_pool.free(request)
    request.kv = None
    request.prefix_indices = request.prefix_indices[:0]


def free_kv(scheduler: SGLangScheduler, request: Request) -> None:
    """Free the pages of a request's KV that it owns."""
    assert request.kv is not None, f"{request.rid} holds KV"
    own = slice(request.cache_protected_len, request.kv.kv_allocated_len)
    kv_indices = scheduler.req_to_token_pool.req_to_token[request.req_pool_idx, own]
    scheduler.token_to_kv_pool_allocator.free(kv_indices)


def end_detached(scheduler: SGLangScheduler, request: Request) -> None:
    """End a request that holds no KV as aborted, and answer with its generated tokens."""
    mark_aborted(request)
    request.update_finish_state()
    attach_expert_choices(request)
    request.time_stats.set_completion_time()
    scheduler.output_streamer.stream_output([request], request.return_logprob)


def await_input(scheduler: SGLangScheduler, milliseconds: int) -> None:
    """Wait for a message for the scheduler, at most this long."""
    scheduler.idle_sleeper.poller.poll(milliseconds)


def shares_prefix(request: Request) -> bool:
    """Return whether a request may use computed pages of other prompts, and others may use its pages."""
    return not needs_whole_prompt(request) and not any(getattr(request, name, None) for name in _OWN_PROMPT)


def needs_whole_prompt(request: Request) -> bool:
    """Return whether a request needs results that only a pass over its whole prompt gives."""
    scored = request.return_logprob and 0 <= request.logprob_start_len < len(request.origin_input_ids)
    return bool(scored or request.return_routed_experts)


def set_max_new_tokens(request: Request, tokens: int) -> None:
    """Set how many tokens a request may generate; a higher minimum is lowered to it."""
    parameters = request.sampling_params
    parameters.max_new_tokens = tokens
    parameters.min_new_tokens = min(parameters.min_new_tokens, tokens)
