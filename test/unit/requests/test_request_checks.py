"""Requests that would crash a scheduler are refused with the value, its limit and the field's name."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sgl_batch.requests.request_checks import (
    MAX_CHOICES,
    check_log_probabilities,
    check_routed_experts,
    check_sampling,
    check_shape,
    check_tokens,
    refusal_of,
)
from sgl_batch.sglang_adapter.refusals import RefusalError

TOO_LONG = "context_length_exceeded"
VOCAB, CONTEXT = 100, 50


def shape(**given: Any) -> SimpleNamespace:
    return SimpleNamespace(**{"text": "Say", "input_ids": None, "rid": None, "sampling_params": {}, **given})


def sampling(**given: Any) -> SimpleNamespace:
    good = {"top_k": 1 << 30, "repetition_penalty": 1.0, "logit_bias": None, "stop_token_ids": None}
    return SimpleNamespace(**{**good, "sampling_seed": None, "stream_interval": None, "structural_tag": None, **given})


def logprobs(top: Any, start: Any = -1) -> SimpleNamespace:
    return SimpleNamespace(top_logprobs_num=top, logprob_start_len=start)


@pytest.mark.parametrize(
    ("error", "code", "param"),
    [
        (ValueError("top_p must be in (0, 1], got 2.0."), "invalid_value", "top_p"),
        (ValueError("max_new_tokens must be at least 0, got -5."), "invalid_value", "max_new_tokens"),
        (ValueError("The input (9 tokens) is longer than the model's context length (8 tokens)."), TOO_LONG, None),
        (ValueError("Requested token count exceeds the model's maximum context length of 8 tokens."), TOO_LONG, None),
        (TypeError("Unexpected keyword argument 'max_token'"), "unknown_field", "sampling_params"),
    ],
)
def test_what_sglang_refuses_gets_a_code_and_the_field(error: Exception, code: str, param: str | None) -> None:
    refused = refusal_of(error)
    assert isinstance(refused, RefusalError)
    assert (refused.code, refused.param) == (code, param)


def test_a_misspelt_sampling_parameter_gets_the_name_that_was_meant() -> None:
    message = str(refusal_of(TypeError("Unexpected keyword argument 'temprature'")))
    assert message == "temprature is no sampling parameter: did you mean temperature?"


def test_other_errors_of_sglang_stay_the_users_fault() -> None:
    other = ValueError("Only one of regex, json_schema, or ebnf can be set.")
    assert refusal_of(other) is other
    assert "wrong type: 'int' object" in str(refusal_of(TypeError("'int' object is not iterable")))


@pytest.mark.parametrize("given", [[0], [VOCAB - 1, 0, 5]])
def test_tokens_of_the_model_pass(given: list[int]) -> None:
    check_tokens(given, VOCAB)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ([], "no token"),
        ([3, VOCAB], "token id 100; the model's are 0 to 99"),
        ([-1], "token id -1"),
        ([10**400], "very many digits"),
        ([True], "list of token ids"),
        ([1.0], "list of token ids"),
        ([[1]], "list of token ids"),
        ("1", "list of token ids"),
    ],
)
def test_other_tokens_are_refused(given: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        check_tokens(given, VOCAB)


@pytest.mark.parametrize(
    "given",
    [
        shape(),
        shape(text=None, rid="a"),
        shape(text=["a", "b"], rid=["c", "d"], sampling_params=[{"n": 2}, {"n": 2}]),
        shape(sampling_params=None),
        shape(text="", audio_data=["data:,"]),
        shape(sampling_params={"n": MAX_CHOICES}),
    ],
)
def test_texts_and_choices_pass(given: Any) -> None:
    check_shape(given)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (shape(text=[]), "text is"),
        (shape(text=""), "prompt is empty"),
        (shape(text=["a", ""]), "prompt is empty"),
        (shape(input_ids=[1]), "text and input_ids are both given"),
        (shape(text=[3]), "text is"),
        (shape(text={"a": 1}), "text is"),
        (shape(text="\ud800"), "surrogate pair"),
        (shape(rid=[["a"]]), "rid is"),
        (shape(sampling_params=[]), "empty list"),
        (shape(sampling_params=["n"]), "give an object"),
        (shape(sampling_params={"n": 0}), "n is 0"),
        (shape(sampling_params={"n": MAX_CHOICES + 1}), f"n is {MAX_CHOICES + 1}"),
        (shape(sampling_params={"n": 10**5000}), "very many digits"),
        (shape(sampling_params=[{}, {"n": "2"}]), "n is '2'"),
    ],
)
def test_malformed_prompts_and_choices_are_refused(given: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        check_shape(given)


@pytest.mark.parametrize("given", [logprobs(None, None), logprobs(0), logprobs(VOCAB, CONTEXT)])
def test_log_probabilities_of_the_models_tokens_pass(given: Any) -> None:
    check_log_probabilities(given, VOCAB, CONTEXT)


@pytest.mark.parametrize(
    "given", [logprobs(VOCAB + 1), logprobs(-1), logprobs(1 << 63), logprobs(True), logprobs(1, CONTEXT + 1)]
)
def test_more_log_probabilities_than_tokens_are_refused(given: Any) -> None:
    with pytest.raises(ValueError, match="it must be a whole number from"):
        check_log_probabilities(given, VOCAB, CONTEXT)


@pytest.mark.parametrize(
    "given",
    [
        sampling(),
        sampling(
            top_k=1,
            sampling_seed=-(1 << 63),
            repetition_penalty=0.5,
            logit_bias={"5": -1e9},
            stop_token_ids={VOCAB - 1},
            stream_interval=1,
        ),
    ],
)
def test_valid_sampling_parameters_pass(given: Any) -> None:
    check_sampling(given, VOCAB)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (sampling(top_k=1 << 40), "top_k is"),
        (sampling(top_k=1.5), "top_k is 1.5"),
        (sampling(repetition_penalty=1e-300), "repetition_penalty is 1e-300"),
        (sampling(logit_bias={"5": float("nan")}), "token 5 is nan"),
        (sampling(logit_bias={"5": float("inf")}), "token 5 is inf"),
        (sampling(logit_bias={"5": 10**400}), "very many digits"),
        (sampling(logit_bias={"5": "1"}), "token 5 is '1'"),
        (sampling(sampling_seed=1 << 63), "sampling_seed is 9223372036854775808; .* to 9223372036854775807"),
        (sampling(sampling_seed=10**5000), "sampling_seed is a number of very many digits"),
        (sampling(sampling_seed=1.5), "sampling_seed is 1.5"),
        (sampling(stop_token_ids={VOCAB}), "stop_token_ids is 100"),
        (sampling(stream_interval=0), "stream_interval is 0"),
        (sampling(structural_tag=""), "structural_tag is empty"),
    ],
)
def test_sampling_parameters_that_would_crash_a_scheduler_are_refused(given: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        check_sampling(given, VOCAB)


def test_routed_experts_are_refused_where_the_engine_does_not_keep_them() -> None:
    check_routed_experts(SimpleNamespace(return_routed_experts=False), is_enabled=False)
    check_routed_experts(SimpleNamespace(return_routed_experts=True), is_enabled=True)
    with pytest.raises(ValueError, match="start it with --enable-return-routed-experts"):
        check_routed_experts(SimpleNamespace(return_routed_experts=True), is_enabled=False)
