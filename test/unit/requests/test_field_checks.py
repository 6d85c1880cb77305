"""Every field of SGLang's requests is in the table, and a field that is not computed is refused by its name."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterable
from typing import Any

import pytest
from openai.types.chat.completion_create_params import CompletionCreateParamsBase as OpenAIChat
from openai.types.completion_create_params import CompletionCreateParamsBase as OpenAICompletion

from sgl_batch.requests.field_checks import check_generation_fields, check_openai_fields
from sgl_batch.requests.request_fields import ALLOWED, COMPUTED, MEDIA, OTHER_ENGINES, PASSED, REFUSED
from sgl_batch.sglang_adapter import bootstrap
from sgl_batch.sglang_adapter.refusals import RefusalError

with bootstrap.importing():
    from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest, CompletionRequest
    from sglang.srt.managers.io_struct import GenerateReqInput
    from sglang.srt.sampling.sampling_params import SamplingParams

CHAT = {"messages": [{"role": "user", "content": "Say"}]}
COMPLETION = {"prompt": "Say"}
CLASSES: dict[str, Iterable[str]] = {
    "ChatCompletionRequest": ChatCompletionRequest.model_fields,
    "CompletionRequest": CompletionRequest.model_fields,
    "GenerateReqInput": [field.name for field in dataclasses.fields(GenerateReqInput)],
    "SamplingParams": SamplingParams.__struct_fields__,
    "OpenAI's chat": [*typing.get_type_hints(OpenAIChat), "stream"],
    "OpenAI's completion": [*typing.get_type_hints(OpenAICompletion), "stream"],
}


def check_chat(reads_media: bool = False, **fields: Any) -> None:
    body = {**CHAT, **fields}
    check_openai_fields(ChatCompletionRequest.model_validate(body), body, reads_media=reads_media)


def check_completion(**fields: Any) -> None:
    body = {**COMPLETION, **fields}
    check_openai_fields(CompletionRequest.model_validate(body), body, reads_media=False)


def check_generation(given: dict[str, Any] | None = None, reads_media: bool = False, **fields: Any) -> None:
    check_generation_fields(GenerateReqInput(**{"text": "Say", **fields}), given or {}, reads_media=reads_media)


@pytest.mark.parametrize("owner", CLASSES)
def test_every_field_is_in_the_table_once(owner: str) -> None:
    parts = (COMPUTED, PASSED, REFUSED, MEDIA)
    assert [name for name in CLASSES[owner] if not any(name in part for part in parts)] == [], "say what becomes of it"
    assert [name for name in CLASSES[owner] if sum(name in part for part in parts) > 1] == []


def test_every_field_of_the_table_exists_in_some_request() -> None:
    known = {name for names in CLASSES.values() for name in names}
    assert {*COMPUTED, *PASSED, *REFUSED, *MEDIA, *ALLOWED} - known - {"prompt_cache_retention"} == set()


def test_fields_of_other_engines_are_in_no_request_of_ours() -> None:
    assert OTHER_ENGINES.keys() & {name for names in CLASSES.values() for name in names} == set()


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"user": "u", "store": True, "metadata": {"a": "b"}, "service_tier": "auto", "parallel_tool_calls": False},
        {"stream_options": {"include_usage": True}, "modalities": ["text"], "reasoning_effort": "low"},
        {"bootstrap_host": None, "audio": None, "functions": [], "images_config": {}, "max_dynamic_patch": None},
        {"nobody_knows_this": 5, "seed": -(1 << 63), "function_call": "none", "logit_bias": {"7": 1.5}},
        {"chat_id": "c", "provider": {"order": []}, "max_token": None, "guided_json": {}},
    ],
)
def test_computed_harmless_and_empty_fields_pass(fields: dict[str, Any]) -> None:
    check_chat(**fields)
    check_completion(**{name: value for name, value in fields.items() if name != "reasoning_effort"}, best_of=1)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"bootstrap_host": "10.0.0.1"}, "bootstrap_host"),
        ({"task": "query"}, "task"),
        ({"images_config": {"a": 1}}, "images_config"),
        ({"input_embeds": [[0.1]]}, "input_embeds"),
        ({"image_data": ["data:,"]}, "image_data"),
        ({"audio": {"voice": "x"}}, "audio"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"max_new_tokens": 5}, "max_new_tokens"),
        ({"json_schema": "{}"}, "json_schema"),
        ({"seed": 1 << 63}, "seed"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]},
            "messages",
        ),
    ],
)
def test_an_unsupported_field_of_a_chat_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(RefusalError, match=param) as refused:
        check_chat(**fields)
    assert refused.value.param == param


@pytest.mark.parametrize(
    ("name", "meant"),
    [("max_token", "max_tokens"), ("maxTokens", "max_tokens"), ("temprature", "temperature"), ("seeds", "seed")],
)
def test_a_misspelt_field_is_refused_with_the_name_that_was_meant(name: str, meant: str) -> None:
    for check in (check_chat, check_completion):
        with pytest.raises(RefusalError, match=rf"{name} is no field of this endpoint: did you mean {meant}\?"):
            check(**{name: 5})


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"guided_json": {"type": "object"}}, "guided_json"),
        ({"prompt_logprobs": 0}, "prompt_logprobs"),
        ({"max_output_tokens": 5}, "max_output_tokens"),
        ({"logit_bias": {"the": 1.0}}, "logit_bias"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"messages": []}, "messages"),
    ],
)
def test_what_would_be_ignored_or_cannot_be_read_is_refused(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(RefusalError, match=param) as refused:
        check_chat(**fields)
    assert refused.value.param == param


@pytest.mark.parametrize(
    "fields", [{"suffix": "x"}, {"best_of": 3}, {"max_completion_tokens": 4}, {"tools": [{"type": "function"}]}]
)
def test_an_unsupported_field_of_a_completion_is_refused_by_name(fields: dict[str, Any]) -> None:
    [name] = fields
    with pytest.raises(RefusalError) as refused:
        check_completion(**fields)
    assert refused.value.param == name


@pytest.mark.parametrize(
    "fields",
    [
        {"input_embeds": [[0.5]]},
        {"image_data": "x.png"},
        {"audio_data": ["x.wav"]},
        {"bootstrap_room": 3},
        {"bootstrap_port": [None, 3]},
        {"http_worker_ipc": "ipc:///tmp/x"},
        {"return_entropy": True},
        {"return_sampling_mask": True},
        {"encoder_urls": ["http://127.0.0.1"]},
        {"disagg_prefill_dp_rank": 0},
    ],
)
def test_an_unsupported_field_of_a_generation_is_refused_by_name(fields: dict[str, Any]) -> None:
    [name] = fields
    with pytest.raises(RefusalError) as refused:
        check_generation(**fields)
    assert (refused.value.param, refused.value.code) == (name, "unsupported_field")


def test_a_generation_with_supported_fields_passes() -> None:
    check_generation(image_data=[None, None], bootstrap_room=[None], sampling_params={"temperature": 0, "n": 2})
    check_generation(sampling_params=[{"stop": "a"}], given={"text": "Say", "model": "m", "user": "u", "x": 1})
    check_generation(image_data="x.png", reads_media=True)


@pytest.mark.parametrize(
    ("given", "param"), [({"temperature": 0}, "temperature"), ({"data_parallel_rank": 99}, "data_parallel_rank")]
)
def test_a_parameter_in_the_wrong_place_is_refused(given: dict[str, Any], param: str) -> None:
    with pytest.raises(RefusalError, match=f"{param} is no field of /generate"):
        check_generation(given)


@pytest.mark.parametrize("name", ["is_normalized", "stop_strs", "stop_str_max_len"])
def test_sampling_parameters_that_sglang_sets_itself_are_refused(name: str) -> None:
    with pytest.raises(RefusalError) as refused:
        check_generation(sampling_params=[{}, {name: 5}])
    assert refused.value.param == name


def test_images_pass_to_a_model_that_reads_them() -> None:
    part = {"type": "image_url", "image_url": {"url": "data:,"}}
    check_chat(reads_media=True, messages=[{"role": "user", "content": [part]}], max_dynamic_patch=3)
