"""Experts are called once per layer and group, and sequences take the path that docs/architecture.md states."""

from __future__ import annotations

import json
from collections.abc import Callable
from math import ceil
from pathlib import Path
from typing import Any

import pytest

from .conftest import Prompts

pytestmark = pytest.mark.engine

NUM_LAYERS = 4
TOP_K = {"tiny-mixtral": 2, "tiny-deepseek-v3": 4}
EXPERT_LAYERS = {"tiny-mixtral": 4, "tiny-deepseek-v3": 3}


def counted(engine: Any, work: Callable[[], Any]) -> dict[str, int]:
    before = engine.batch_stats()["counters"]
    work()
    after = engine.batch_stats()["counters"]
    return {name: after[name] - before.get(name, 0) for name in after}


@pytest.mark.parametrize("family", TOP_K)
def test_experts_are_called_once_per_layer_and_group_and_attention_once_per_sub_batch(
    family: str, batch_engine: Callable[..., Any], prompts: Prompts
) -> None:
    b_attn, choices, steps, prompt = 7, 6, 9, prompts.input_ids[8]
    engine = batch_engine(family, b_attn)
    request = {"n": choices, "temperature": 0, "max_new_tokens": steps + 1, "ignore_eos": True}
    counts = counted(engine, lambda: engine.generate(input_ids=prompt, sampling_params=request))
    prefill, forks = len(prompt), choices - 1
    assert counts["prefill_rows"] == prefill + forks, "the prompt is computed once; other choices add one row each"
    assert counts["prompts_shared"] == forks
    assert (counts["prefill_groups"], counts["decode_groups"]) == (2, steps)
    assert counts["decode_rows"] == choices * steps
    assert counts["expert_calls"] == EXPERT_LAYERS[family] * (2 + steps)
    rows = EXPERT_LAYERS[family] * (prefill + forks + choices * steps)
    unread = prefill - 1  # the last layer computes the last token of the prompt alone
    assert counts["expert_rows"] == TOP_K[family] * (rows - unread)
    sub_batches = ceil(prefill / b_attn) + ceil(forks / b_attn) + steps * ceil(choices / b_attn)
    assert counts["attention_calls"] == NUM_LAYERS * sub_batches
    assert counts.get("forwards_by_sglang", 0) == 0, "nothing falls back to SGLang's own forward"


def test_without_accumulate_experts_are_called_once_per_sub_batch_and_tokens_are_the_same(
    batch_engine: Callable[..., Any], prompts: Prompts
) -> None:
    engine = batch_engine("tiny-mixtral", 7)
    request = {"n": 6, "temperature": 0.9, "sampling_seed": 3, "max_new_tokens": 8, "ignore_eos": True}
    prompt = prompts.input_ids[8]
    combined = engine.generate(input_ids=prompt, sampling_params=request)
    engine = batch_engine("tiny-mixtral", 3, accumulate=False)
    results: list[Any] = []
    counts = counted(engine, lambda: results.extend(engine.generate(input_ids=prompt, sampling_params=request)))
    unread = ceil(len(prompt) / 3) - 1  # in the last layer, sub-batches without the last token of the prompt
    assert counts["expert_calls"] == counts["attention_calls"] - unread
    assert [r["output_ids"] for r in results] == [r["output_ids"] for r in combined]


def test_every_sequence_takes_the_documented_path_and_waits_for_boundaries(
    batch_engine: Callable[..., Any], prompts: Prompts, tmp_path: Path
) -> None:
    trace = tmp_path / "trace.jsonl"
    engine = batch_engine("tiny-qwen3-moe", 7, trace_file=str(trace))
    results = engine.generate(input_ids=prompts.input_ids, sampling_params=prompts.sampling_params)
    stats = engine.batch_stats()  # answers after the last step is done and its trace is written
    paths: dict[str, list[str]] = {}
    for line in trace.read_text().splitlines():
        event = json.loads(line)
        if "sequence" not in event:
            continue
        path = paths.setdefault(event["sequence"], [event["from"]])
        assert path[-1] == event["from"], "each event begins where the one before it ended"
        assert event["why"]
        path.append(event["to"])
    for result, parameters in zip(results, prompts.sampling_params, strict=True):
        whole = ["QUEUED", "PREFILLING", "READY", "RUNNING", "FINISHED"]
        one_token = ["QUEUED", "PREFILLING", "FINISHED"]
        expected = one_token if parameters["max_new_tokens"] == 1 else whole
        assert paths[result["meta_info"]["id"]] == expected
    assert stats["free_pages"] == stats["total_pages"], "every page is given back"
    assert stats["counters"]["boundaries"] > 1
