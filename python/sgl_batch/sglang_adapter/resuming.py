"""SGLang's requests that another process has begun: how a new one goes on behind tokens that it did not generate."""

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
    """Let a new request generate all of its tokens; its key is taken away."""
    request.extra_key = None


def resume_from(scheduler: SGLangScheduler, request: Request, tokens: Sequence[int]) -> None:
    """Let a new request have generated `tokens`; its prefill is then that of a retracted one. Its key is taken away.

    They are sent in the parts in which they were sent when they were generated: incremental detokenization then meets
    the same bounds, and makes the same text.
    """
    request.extra_key = None
    for end in range(DEFAULT_FORCE_STREAM_INTERVAL, len(tokens) + 1, DEFAULT_FORCE_STREAM_INTERVAL):
        request.output_ids = array("q", tokens[:end])
        scheduler.output_streamer.stream_output([request], request.return_logprob)
    request.output_ids = array("q", tokens)
    scheduler.batch_result_processor._maybe_update_reasoning_tokens(request, list(tokens))
