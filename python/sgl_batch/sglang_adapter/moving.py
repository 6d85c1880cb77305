"""SGLang's requests as plain data and back, for sequences that go from one scheduler process to another."""

from __future__ import annotations

from array import array

import msgspec

from sgl_batch.sglang_adapter import bootstrap
from sgl_batch.sglang_adapter.types.batches import ScheduleBatch
from sgl_batch.sglang_adapter.types.requests import Request
from sgl_batch.sglang_adapter.types.scheduler import SGLangScheduler

with bootstrap.importing():
    import torch
    from sglang.srt.managers.schedule_batch import Req, ReqKvInfo
    from sglang.srt.mem_cache.common import release_kv_cache
    from sglang.srt.sampling.sampling_params import SamplingParams

__all__ = ["attach", "movable", "progress_of", "rebuild", "release", "remove_from_batch", "sampling_of"]

# What the output streamer and the detokenizer have to find again: plain values of a request.
_PROGRESS = ("stream", "extra_key", "priority", "cached_tokens", "send_token_offset", "send_decode_id_offset")
# Requests that carry anything of these stay where they are: it is no plain data, or has no form of ours yet.
_ROOTED = (
    "return_logprob",
    "return_sampling_mask",
    "return_hidden_states",
    "return_routed_experts",
    "return_indexer_topk",
    "grammar",
    "grammar_key",
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
    """Whether all that a request carries can be written down."""
    rooted = any(getattr(request, name, None) for name in _ROOTED)
    return not rooted and not request.sampling_params.custom_params and bool(request.output_ids)


def sampling_of(request: Request) -> dict[str, object]:
    """The sampling parameters as plain data."""
    plain: dict[str, object] = msgspec.to_builtins(request.sampling_params)
    return plain


def progress_of(request: Request) -> dict[str, object]:
    """What has been sent of the output, and what else a request carries beside tokens and parameters."""
    return {name: getattr(request, name) for name in _PROGRESS}


def rebuild(
    scheduler: SGLangScheduler,
    *,
    rid: str,
    prompt_tokens: list[int],
    generated_tokens: list[int],
    sampling: dict[str, object],
    progress: dict[str, object],
    position: int,
) -> Request:
    """The request as it stood on the rank that it came from; it holds no slot and no KV yet."""
    request: Request = Req(
        rid,
        "",
        array("q", prompt_tokens),
        msgspec.convert(sampling, SamplingParams),
        stream=progress["stream"],
        eos_token_ids=scheduler.model_config.hf_eos_token_id,
        vocab_size=scheduler.model_config.vocab_size,
        extra_key=progress["extra_key"],
        priority=progress["priority"],
    )
    request.tokenizer = scheduler.tokenizer
    request.output_ids = array("q", generated_tokens)
    for name in _PROGRESS:
        setattr(request, name, progress[name])
    request.kv_committed_len = position
    request.logprob_start_len = len(prompt_tokens) - 1
    return request


def attach(scheduler: SGLangScheduler, request: Request, slots: torch.Tensor) -> None:
    """Give a rebuilt request a place in the table of slots, and the KV at `slots` [position]."""
    pool = scheduler.req_to_token_pool
    found = pool.alloc([request])
    assert found is not None, "a place was counted for every sequence that comes"
    pool.req_to_token[request.req_pool_idx, : len(slots)] = slots.to(pool.req_to_token.dtype)
    request.kv = ReqKvInfo(kv_allocated_len=len(slots), swa_evicted_seqlen=0)


def release(scheduler: SGLangScheduler, request: Request) -> None:
    """Free what a request holds; nothing is sent of it any more from here."""
    release_kv_cache(request, scheduler.tree_cache, is_insert=False)


def remove_from_batch(running: ScheduleBatch, request: Request) -> None:
    """Take one request out of a decode batch."""
    running.filter_batch(keep_indices=[i for i, other in enumerate(running.reqs) if other is not request])
