"""Decides which generation requests are refused although SGLang accepts them, because they would crash a scheduler.

A scheduler that raises ends the engine with all requests in flight. Every check raises ValueError, most of them
RefusalError: SGLang's endpoints answer it with 400, and a line of a job gets it as its own error.
"""

from __future__ import annotations

import re
from typing import Any

from sgl_batch.requests.field_checks import MISPLACED, asks, check_seed, meant_name, shown, wrong_field
from sgl_batch.requests.request_fields import COMPUTED, MEDIA
from sgl_batch.sglang_adapter.refusals import RefusalError
from sgl_batch.sglang_adapter.types.messages import GenerationRequest
from sgl_batch.sglang_adapter.types.requests import SamplingParams

MAX_CHOICES = 16_384  # each is a sequence of its own, known to three processes before any of them runs
MAX_LOGIT_BIAS = 1e9  # so that no logit becomes infinite, divided by any temperature
MIN_REPETITION_PENALTY = 1e-6
MAX_TOP_K = (1 << 31) - 1
# What SGLang says of a name that it does not know, and of a prompt that is too long alone or with its answer.
_UNEXPECTED = re.compile(r"Unexpected keyword argument '(\w+)'")
_TOO_LONG = ("longer than the model's context length", "exceeds the model's maximum context length")


def refusal_of(error: Exception) -> ValueError:
    """Return what SGLang raised for a request as a ValueError: a RefusalError where its message names a field."""
    message = str(error)
    if isinstance(error, RefusalError):
        return error
    if (unknown := _UNEXPECTED.search(message)) is not None:
        meant = meant_name(unknown[1], COMPUTED)
        return RefusalError(f"{unknown[1]} is no sampling parameter{meant}", code=MISPLACED, param="sampling_params")
    if not isinstance(error, ValueError):
        return ValueError(f"a sampling parameter has a value of a wrong type: {message}")
    if any(text in message for text in _TOO_LONG):
        return RefusalError(message, code="context_length_exceeded")
    name = message.split(maxsplit=1)[0] if message.strip() else ""
    return wrong_field(name, message) if name in COMPUTED else error


def check_shape(request: GenerationRequest) -> None:
    """Check the prompt, the ids and the number of choices of a request, before it is tokenized."""
    _check_texts("text", request.text)
    _check_texts("rid", request.rid)
    is_empty = request.text == "" or (isinstance(request.text, list) and "" in request.text)
    if is_empty and not any(asks(getattr(request, name, None)) for name in MEDIA):
        raise wrong_field("text", "the prompt is empty; give at least one token to continue from")
    if request.text is not None and request.input_ids is not None:
        raise wrong_field(
            "input_ids", "text and input_ids are both given, and only one can be the prompt; leave one out"
        )
    parameters = request.sampling_params
    if parameters == []:
        raise wrong_field("sampling_params", "sampling_params is an empty list; give an object, or one for each prompt")
    for one in parameters if isinstance(parameters, list) else [parameters or {}]:
        if not isinstance(one, dict):
            raise wrong_field("sampling_params", f"sampling_params is {shown(one)}; give an object")
        _check_integer("n", one.get("n", 1), 1, MAX_CHOICES)


def check_tokens(input_ids: object, vocab_size: int) -> None:
    """Check the token ids that a user gives instead of a text."""
    if not isinstance(input_ids, list) or not all(type(one) is int for one in input_ids):
        raise wrong_field("input_ids", f"input_ids is {shown(input_ids)}; give a list of token ids")
    if not input_ids:
        raise wrong_field("input_ids", "the prompt has no token; give at least one to continue from")
    if not (min(input_ids) >= 0 and max(input_ids) < vocab_size):
        wrong = next(one for one in input_ids if not 0 <= one < vocab_size)
        message = f"the prompt has the token id {shown(wrong)}; the model's are 0 to {vocab_size - 1}"
        raise wrong_field("input_ids", message)


def check_log_probabilities(request: GenerationRequest, vocab_size: int, context_length: int) -> None:
    """Check which log probabilities a request asks for."""
    _check_integer("top_logprobs_num", request.top_logprobs_num or 0, 0, vocab_size)
    start = -1 if request.logprob_start_len is None else request.logprob_start_len
    _check_integer("logprob_start_len", start, -1, context_length)


def check_routed_experts(request: GenerationRequest, *, is_enabled: bool) -> None:
    """Check that a request asks for the choice of its experts only where the engine keeps it."""
    if request.return_routed_experts and not is_enabled:
        name = "return_routed_experts"
        raise wrong_field(name, f"{name} needs an engine that keeps them: start it with --enable-return-routed-experts")


def check_sampling(parameters: SamplingParams, vocab_size: int) -> None:
    """Check sampling parameters after SGLang's own checks of them."""
    _check_integer("top_k", parameters.top_k, 1, MAX_TOP_K)
    check_seed("sampling_seed", parameters.sampling_seed)
    if parameters.repetition_penalty < MIN_REPETITION_PENALTY:
        penalty = parameters.repetition_penalty
        name = "repetition_penalty"
        raise wrong_field(name, f"{name} is {penalty}; it must be at least {MIN_REPETITION_PENALTY}")
    for token, bias in (parameters.logit_bias or {}).items():
        if not (isinstance(bias, int | float) and abs(bias) <= MAX_LOGIT_BIAS):
            limits = f"give a number from {-MAX_LOGIT_BIAS:g} to {MAX_LOGIT_BIAS:g}"
            raise wrong_field("logit_bias", f"logit_bias of token {token} is {shown(bias)}; {limits}")
    for stop_token in parameters.stop_token_ids or ():
        _check_integer("stop_token_ids", stop_token, 0, vocab_size - 1, what="one of stop_token_ids")
    if parameters.structural_tag == "":
        raise wrong_field("structural_tag", "structural_tag is empty; leave it out")
    if parameters.stream_interval is not None:
        _check_integer("stream_interval", parameters.stream_interval, 1, MAX_TOP_K)


def _check_texts(name: str, value: object) -> None:
    """Check that a value is a text or a list of texts that can be sent to another process, or is missing."""
    texts: list[Any] = value if isinstance(value, list) else [value or ""]
    if value == [] or not all(isinstance(one, str) for one in texts):
        raise wrong_field(name, f"{name} is {shown(value)}; give a text, or a list of texts")
    try:
        "".join(texts).encode("utf-8")
    except UnicodeEncodeError:
        raise wrong_field(name, f"{name} has half of a surrogate pair (\\ud800 to \\udfff) without the other") from None


def _check_integer(name: str, value: object, low: int, high: int, *, what: str = "") -> None:
    if type(value) is not int or not low <= value <= high:
        raise wrong_field(name, f"{what or name} is {shown(value)}; it must be a whole number from {low} to {high}")
