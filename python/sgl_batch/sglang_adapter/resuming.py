"""Adapts SGLang's requests for resumption: a new request continues after tokens that another process generated."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from sgl_batch.sglang_adapter import bootstrap
from sgl_batch.sglang_adapter.types.requests import Request
from sgl_batch.sglang_adapter.types.scheduler import SGLangScheduler

with bootstrap.importing():
    from sglang.srt.managers.scheduler_components.output_streamer import DEFAULT_FORCE_STREAM_INTERVAL

__all__ = ["resume_from", "start_anew"]


def start_anew(request: Request) -> None:
    """Let a new request generate all of its tokens. Its tag in `extra_key` is removed."""
    request.extra_key = None


def resume_from(scheduler: SGLangScheduler, request: Request, tokens: Sequence[int]) -> None:
    """Let a new request continue after `tokens`, as a retracted request does. Its tag in `extra_key` is removed.

    The tokens are sent in the same parts as when they were generated: incremental detokenization then has the same
    bounds, and makes the same text.
    """
    request.extra_key = None
    for end in range(DEFAULT_FORCE_STREAM_INTERVAL, len(tokens) + 1, DEFAULT_FORCE_STREAM_INTERVAL):
        request.output_ids = array("q", tokens[:end])
        scheduler.output_streamer.stream_output([request], request.return_logprob)
    request.output_ids = array("q", tokens)
    scheduler.batch_result_processor._maybe_update_reasoning_tokens(request, list(tokens))
