"""Sampled tokens depend on the request alone: not on sub-batches, neighbours or the order of arrival."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from .conftest import Prompts

pytestmark = pytest.mark.engine

SEEDED = {"temperature": 0.9, "top_p": 0.95, "sampling_seed": 1234, "max_new_tokens": 30, "ignore_eos": True}


@pytest.fixture(scope="module")
def alone(batch_engine: Callable[..., Any], prompts: Prompts) -> list[list[int]]:
    """Seeded outputs of three prompts, each sent by itself."""
    engine = batch_engine("tiny-qwen3-moe")
    chosen = prompts.input_ids[4:7]
    return [engine.generate(input_ids=ids, sampling_params=SEEDED)["output_ids"] for ids in chosen]


@pytest.mark.parametrize("b_attn", [None, 3])
def test_seeded_sampling_does_not_depend_on_neighbours_or_sub_batches(
    b_attn: int | None, alone: list[list[int]], batch_engine: Callable[..., Any], prompts: Prompts
) -> None:
    engine = batch_engine("tiny-qwen3-moe", b_attn)
    others = [{"temperature": 1.3, "max_new_tokens": 5 + i, "ignore_eos": True} for i in range(9)]
    parameters = [*others[:5], SEEDED, others[5], SEEDED, *others[6:], SEEDED]
    neighbours = prompts.input_ids[:4] + prompts.input_ids[7:]
    ids = [*neighbours[:5], prompts.input_ids[4], neighbours[5], prompts.input_ids[5], *neighbours[6:9]]
    ids.append(prompts.input_ids[6])
    results = engine.generate(input_ids=ids, sampling_params=parameters)
    assert [results[i]["output_ids"] for i in (5, 7, 11)] == alone


def test_choices_differ_and_the_first_equals_the_single_answer(
    alone: list[list[int]], batch_engine: Callable[..., Any], prompts: Prompts
) -> None:
    engine = batch_engine("tiny-qwen3-moe")
    results = engine.generate(input_ids=prompts.input_ids[4], sampling_params={**SEEDED, "n": 4})
    outputs = [tuple(result["output_ids"]) for result in results]
    assert list(outputs[0]) == alone[0]
    assert len(set(outputs)) == 4


def test_requests_without_a_seed_differ(batch_engine: Callable[..., Any], prompts: Prompts) -> None:
    engine = batch_engine("tiny-qwen3-moe")
    request = {key: value for key, value in SEEDED.items() if key != "sampling_seed"}
    results = engine.generate(input_ids=[prompts.input_ids[4]] * 3, sampling_params=request)
    assert len({tuple(result["output_ids"]) for result in results}) == 3


def test_penalties_apply_from_the_second_token_on_and_survive_refills(
    batch_engine: Callable[..., Any], prompts: Prompts
) -> None:
    engine = batch_engine("tiny-qwen3-moe")
    request = {"temperature": 0, "frequency_penalty": 2.0, "max_new_tokens": 40, "ignore_eos": True}
    ids = prompts.input_ids[4]
    single = engine.generate(input_ids=ids, sampling_params=request)["output_ids"]
    crowd = engine.generate(input_ids=[ids] * 20, sampling_params=request)
    assert [result["output_ids"] for result in crowd] == [single] * 20
    free = engine.generate(input_ids=ids, sampling_params={**request, "frequency_penalty": 0.0})["output_ids"]
    assert len(set(single)) > len(set(free)), "penalised text repeats itself less"


def test_stop_strings_token_limits_and_logprobs_are_honoured(
    batch_engine: Callable[..., Any], prompts: Prompts
) -> None:
    engine = batch_engine("tiny-qwen3-moe")
    request = {"temperature": 0, "max_new_tokens": 30, "stop": ["e"]}
    result = engine.generate(
        input_ids=prompts.input_ids[4], sampling_params=request, return_logprob=True, top_logprobs_num=2
    )
    meta = result["meta_info"]
    assert "e" not in result["text"]
    assert meta["finish_reason"]["type"] in ("stop", "length")
    assert len(meta["output_token_logprobs"]) == meta["completion_tokens"]
    for (logprob, token, _), best in zip(meta["output_token_logprobs"], meta["output_top_logprobs"], strict=True):
        assert token == best[0][1]
        assert logprob == pytest.approx(best[0][0])
        assert best[0][0] >= best[1][0]


def test_json_schema_shapes_the_output(batch_engine: Callable[..., Any], prompts: Prompts) -> None:
    engine = batch_engine("tiny-qwen3-moe")
    schema = {
        "type": "object",
        "properties": {"kind": {"enum": ["duck", "egg"]}, "sold": {"type": "boolean"}},
        "required": ["kind", "sold"],
        "additionalProperties": False,
    }
    request = {"temperature": 0, "frequency_penalty": 2.0, "max_new_tokens": 200, "json_schema": json.dumps(schema)}
    results = engine.generate(input_ids=[prompts.input_ids[4]] * 2, sampling_params=request)
    for result in results:
        value = json.loads(result["text"])
        assert value["kind"] in ("duck", "egg")
        assert isinstance(value["sold"], bool)
