"""Adapts SGLang's tokenizer manager and its messages for our managers room.

It exports their classes, checks and completes tokenized requests, and makes one request of each choice.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec

from sgl_batch.sglang_adapter import bootstrap
from sgl_batch.sglang_adapter.types.messages import ChoiceRequest, PromptsRequest
from sgl_batch.sglang_adapter.types.requests import TokenizedRequest

with bootstrap.importing():
    from sglang.srt.entrypoints.engine import init_tokenizer_manager
    from sglang.srt.managers.communicator import FanOutCommunicator
    from sglang.srt.managers.io_struct import (
        FlushCacheReqInput,
        SetInternalStateReq,
        TokenizedGenerateReqInput,
        dec_hook,
        enc_hook,
    )
    from sglang.srt.managers.tokenizer_manager import ServerStatus, SignalHandler, TokenizerManager

__all__ = [
    "FlushCacheReqInput",
    "ServerStatus",
    "SetInternalStateReq",
    "SignalHandler",
    "TokenizerManager",
    "as_attention_ranks",
    "calls_to_schedulers",
    "check_serializable",
    "choice_of",
    "init_tokenizer_manager",
    "is_repeatable",
    "name_choices",
    "prepare_request",
]


# With any of these, an answer has more than its tokens, or depends on more than the tokens before.
_MORE_THAN_TOKENS = (
    "stream",
    "return_logprob",
    "return_sampling_mask",
    "return_hidden_states",
    "return_routed_experts",
    "return_indexer_topk",
    "return_entropy",
    "input_embeds",
    "positional_embed_overrides",
    "mm_inputs",
    "session_id",
    "session_params",
    "lora_id",
    "custom_logit_processor",
)
_GRAMMARS = ("json_schema", "regex", "ebnf", "structural_tag")


def calls_to_schedulers(manager: Any) -> dict[str, Any]:
    """Return the communicators with which a tokenizer manager calls all schedulers, by attribute name."""
    return {name: value for name, value in vars(manager).items() if isinstance(value, FanOutCommunicator)}


def is_repeatable(tokenized: TokenizedRequest) -> bool:
    """Return whether a request's answer follows from its prompt, its parameters and its first tokens."""
    parameters = tokenized.sampling_params
    more = any(getattr(tokenized, name) for name in _MORE_THAN_TOKENS)
    bound = any(getattr(parameters, name) for name in (*_GRAMMARS, "custom_params"))
    return not more and not bound and parameters.n == 1


_ENCODER = msgspec.msgpack.Encoder(enc_hook=enc_hook)
_DECODER = msgspec.msgpack.Decoder(TokenizedGenerateReqInput, dec_hook=dec_hook)
# Fields that users do not set: they are large, or not yet in the form in which they are sent.
_NOT_A_USERS = ("input_text", "input_ids", "mm_inputs", "time_stats", "positional_embed_overrides")


def check_serializable(tokenized: TokenizedRequest) -> None:
    """Raise ValueError for a request with a field that the scheduler cannot read: it would end the scheduler."""
    shallow = copy.copy(tokenized)
    for name in _NOT_A_USERS:
        setattr(shallow, name, None)
    try:
        _DECODER.decode(_ENCODER.encode(shallow))
    except (msgspec.MsgspecError, OverflowError, TypeError, UnicodeEncodeError) as error:
        raise ValueError(f"a field of the request has a value of another type than it takes: {error}") from error


@contextmanager
def as_attention_ranks(server_args: Any) -> Iterator[None]:
    """Inside, SGLang treats several schedulers as ranks of one engine, whose weights change together."""
    if server_args.dp_size == 1:
        yield
        return
    server_args.override("sgl_batch.weights", enable_dp_attention=True)
    try:
        yield
    finally:
        server_args.override("sgl_batch.weights", enable_dp_attention=False)


def prepare_request(tokenized: TokenizedRequest, *, extra_key: str | None, seed: int) -> None:
    """Set the prefix-cache key and the sampling seed of a tokenized request; its parameters become a copy."""
    tokenized.extra_key = extra_key
    tokenized.sampling_params = copy.copy(tokenized.sampling_params)
    tokenized.sampling_params.sampling_seed = seed


def name_choices(request: PromptsRequest, count: int) -> list[str]:
    """Give `count` choices of each prompt of `request` their ids, prompt by prompt, and return them.

    If the user gave one id or none, SGLang has made these ids: ID_0, ID_1, ... If the user gave one for each prompt,
    the choices of each prompt are named in the same way.
    """
    if len(request.rid) == request.batch_size:
        request.rid = [f"{rid}_{index}" for rid in request.rid for index in range(count)]
    assert len(request.rid) == request.batch_size * count, f"{len(request.rid)} request ids"
    return list(request.rid)


def choice_of(
    request: ChoiceRequest, tokenized: TokenizedRequest, *, rid: str, extra_key: str, seed: int, attention_rank: int
) -> tuple[ChoiceRequest, TokenizedRequest]:
    """Copy a request and its tokenized form for one choice, with the request id `rid`, for an attention rank."""
    request, tokenized = copy.copy(request), copy.copy(tokenized)
    request.rid = tokenized.rid = rid
    if tokenized.routed_dp_rank is None:
        tokenized.routed_dp_rank = attention_rank
    prepare_request(tokenized, extra_key=extra_key, seed=seed)
    return request, tokenized
