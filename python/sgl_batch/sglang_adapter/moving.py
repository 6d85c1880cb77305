"""Adapts SGLang's requests for migration: a request as plain data, and rebuilt from it in another scheduler process."""

from __future__ import annotations

from array import array
from typing import Any

import msgspec

from sgl_batch.sglang_adapter import bootstrap
from sgl_batch.sglang_adapter.moving_results import put_back_results, results_of
from sgl_batch.sglang_adapter.types.batches import ScheduleBatch
from sgl_batch.sglang_adapter.types.requests import Request
from sgl_batch.sglang_adapter.types.scheduler import SGLangScheduler

with bootstrap.importing():
    import torch
    from sglang.srt.managers.schedule_batch import Req, ReqKvInfo
    from sglang.srt.mem_cache.common import release_kv_cache
    from sglang.srt.sampling.sampling_params import SamplingParams

__all__ = [
    "attach",
    "movable",
    "progress_of",
    "prompt_replica",
    "queue",
    "rebuild",
    "release",
    "remove_from_batch",
    "replicable",
    "sampling_of",
    "shares_prompt",
]

# The plain values of a request that its constructor takes, and those that are set on it afterwards: what the output
# streamer and the detokenizer need, its reasoning, and what its answer reports.
_MADE_WITH = ("stream", "extra_key", "priority", "require_reasoning")
_PROGRESS = (
    "cached_tokens",
    "cached_tokens_device",
    "cached_tokens_host",
    "cached_tokens_storage",
    "send_token_offset",
    "send_decode_id_offset",
    "logprob_start_len",
    "retraction_count",
    "reasoning_tokens",
    "_is_reasoning_over",
)
# Requests with any of these are not moved: it is not plain data, or the engine serves no such requests, or they end.
_ROOTED = (
    "return_sampling_mask",
    "return_hidden_states",
    "return_indexer_topk",
    "custom_logit_processor",
    "lora_id",
    "session",
    "session_id",
    "input_embeds",
    "positional_embed_overrides",
    "multimodal_inputs",
    "http_worker_ipc",
    "to_finish",
    "finished_reason",
)


def movable(request: Request) -> bool:
    """Return whether all of a request can be written as plain data."""
    return not _is_rooted(request)


def _is_rooted(request: Request) -> bool:
    return any(getattr(request, name, None) for name in _ROOTED) or bool(request.sampling_params.custom_params)


def shares_prompt(request: Request) -> bool:
    """Return whether the tokens of a new request are all that another rank needs to compute its prompt as well.

    Log probabilities take rows of the last product that the other rank would not have.
    """
    return not (_is_rooted(request) or request.output_ids or request.return_logprob)


def replicable(request: Request) -> bool:
    """Return whether copies of a request end at the same token on each rank. The search for stop_regex takes time."""
    return not request.sampling_params.stop_regex_strs


def sampling_of(request: Request) -> dict[str, object]:
    """Return the sampling parameters as plain data."""
    plain: dict[str, object] = msgspec.to_builtins(request.sampling_params)
    return plain


def progress_of(request: Request) -> dict[str, object]:
    """Return how much output was sent, and all else of a request beyond tokens and parameters, as plain data."""
    plain = {name: getattr(request, name) for name in (*_MADE_WITH, *_PROGRESS)}
    return {**plain, "results": results_of(request)}


def rebuild(
    scheduler: SGLangScheduler,
    *,
    rid: str,
    prompt_tokens: list[int],
    generated_tokens: list[int],
    sampling: dict[str, object],
    progress: dict[str, Any],
    position: int,
) -> Request:
    """Rebuild a request in the state that it had on its source rank. It has no request slot, KV or grammar yet."""
    request: Request = Req(
        rid,
        "",
        array("q", prompt_tokens),
        msgspec.convert(sampling, SamplingParams),
        eos_token_ids=scheduler.model_config.hf_eos_token_id,
        vocab_size=scheduler.model_config.vocab_size,
        **{name: progress[name] for name in _MADE_WITH},
    )
    request.tokenizer = scheduler.tokenizer
    request.output_ids = array("q", generated_tokens)
    for name in _PROGRESS:
        setattr(request, name, progress[name])
    request.kv_committed_len = position
    put_back_results(request, progress["results"])
    return request


def prompt_replica(scheduler: SGLangScheduler, rid: str, tokens: list[int]) -> Request:
    """Return a request that computes the same rows as the prompt of these tokens, and ends with its first token."""
    sampling = SamplingParams(max_new_tokens=1, temperature=0.0, ignore_eos=True)
    sampling.normalize(None)
    request: Request = Req(
        rid,
        "",
        array("q", tokens),
        sampling,
        eos_token_ids=scheduler.model_config.hf_eos_token_id,
        vocab_size=scheduler.model_config.vocab_size,
    )
    request.tokenizer = scheduler.tokenizer
    return request


def attach(scheduler: SGLangScheduler, request: Request, kv_indices: torch.Tensor) -> None:
    """Give a rebuilt request a request slot, and the KV at `kv_indices` [position]."""
    pool = scheduler.req_to_token_pool
    found = pool.alloc([request])
    assert found is not None, "a request slot was reserved for every sequence that arrives"
    pool.req_to_token[request.req_pool_idx, : len(kv_indices)] = kv_indices.to(pool.req_to_token.dtype)
    request.kv = ReqKvInfo(kv_allocated_len=len(kv_indices), swa_evicted_seqlen=0)


def queue(scheduler: SGLangScheduler, request: Request) -> None:
    """Append a rebuilt request that has no KV to the queue, as one that begins or was retracted."""
    request.extra_key = None  # a choice's tag: the other choices are elsewhere
    if request.output_ids:
        request.logprob_start_len = -1  # the prompt's log probabilities are there already
    request.time_stats.set_wait_queue_entry_time()
    scheduler.waiting_queue.append(request)


def release(scheduler: SGLangScheduler, request: Request) -> None:
    """Free the request slot and the KV of a request that this process no longer answers."""
    release_kv_cache(request, scheduler.tree_cache, is_insert=False)


def remove_from_batch(running: ScheduleBatch, request: Request) -> None:
    """Remove one request from a decode batch."""
    running.filter_batch(keep_indices=[i for i, other in enumerate(running.reqs) if other is not request])
