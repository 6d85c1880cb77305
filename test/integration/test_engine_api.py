"""Engine behaves as sglang.Engine: generate, async_generate, streaming, and clear errors at start."""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import Callable
from typing import Any

import psutil
import pytest

from sgl_batch import Engine
from sgl_batch.engine import launch
from sgl_batch.errors import ConfigError, EngineError

from .conftest import Prompts

pytestmark = pytest.mark.engine

REQUEST = {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True}


def test_generate_answers_one_prompt_with_one_result_and_a_list_with_a_list(
    batch_engine: Callable[..., Any],
) -> None:
    engine = batch_engine("tiny-qwen3-moe")
    one = engine.generate("What does os.path.join do?", REQUEST)
    two = engine.generate(["What does os.path.join do?", "Return the"], REQUEST)
    assert isinstance(one["text"], str)
    assert two[0]["text"] == one["text"]


def test_streaming_ends_with_the_whole_text(batch_engine: Callable[..., Any]) -> None:
    engine = batch_engine("tiny-qwen3-moe")
    whole = engine.generate("Return the", REQUEST)["text"]
    chunks = [chunk["text"] for chunk in engine.generate("Return the", REQUEST, stream=True)]
    assert len(chunks) > 1
    assert chunks[-1] == whole
    assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(chunks))


def test_async_generate_runs_requests_together_and_streams(batch_engine: Callable[..., Any]) -> None:
    engine = batch_engine("tiny-qwen3-moe")

    async def run() -> tuple[list[str], list[str]]:
        prompts = ["Return the", "What does os.path.join do?", "The"]
        answers = await asyncio.gather(*(engine.async_generate(p, REQUEST) for p in prompts))
        stream = await engine.async_generate(prompts[0], REQUEST, stream=True)
        return [a["text"] for a in answers], [chunk["text"] async for chunk in stream]

    texts, streamed = engine.loop.run_until_complete(run())
    assert streamed[-1] == texts[0]


def test_our_classes_are_the_ones_that_run(batch_engine: Callable[..., Any]) -> None:
    classes = batch_engine("tiny-qwen3-moe").running["classes"]
    assert classes == {**launch.EXPECTED_CLASSES, **launch.EXPECTED_CPU_CLASSES}


def test_the_process_that_forks_an_engine_s_processes_has_no_threads(batch_engine: Callable[..., Any]) -> None:
    scheduler, detokenizer = batch_engine("tiny-qwen3-moe").own_processes
    server = scheduler.parent()
    assert server == detokenizer.parent() != psutil.Process()
    assert server.num_threads() == 1, "an import has started a thread, and such a process cannot be forked safely"


def test_an_engine_s_life_leaves_no_descriptor_open(
    started: Callable[..., Any], model_path: Callable[[str], str]
) -> None:
    left = []
    for _ in range(2):  # the first engine of a process opens what later ones use too
        engine = started(model_path=model_path("tiny-qwen3-moe"), max_total_tokens=4096)
        engine.generate("Return the", REQUEST)
        engine.shutdown()
        with pytest.raises(EngineError, match="has been shut down: make another one"):
            engine.generate("Return the", REQUEST)
        left.append(sorted(os.readlink(f.path) for f in os.scandir("/proc/self/fd") if os.path.lexists(f.path)))
    assert len(left[0]) == len(left[1]), left


def test_requests_beyond_the_pool_are_refused_with_numbers_and_others_go_on(
    batch_engine: Callable[..., Any], prompts: Prompts
) -> None:
    engine = batch_engine("tiny-qwen3-moe", max_total_tokens=512)
    with pytest.raises(ValueError, match=r"600 tokens.*pages of 16 tokens, but the device holds 32.*max-total-tokens"):
        engine.generate(input_ids=prompts.input_ids[-1], sampling_params={"temperature": 0, "max_new_tokens": 8})
    result = engine.generate(input_ids=[prompts.input_ids[5]] * 20, sampling_params=REQUEST)
    assert [r["meta_info"]["completion_tokens"] for r in result] == [12] * 20


def test_an_engine_that_does_not_start_leaves_another_engine_of_the_process_running(
    batch_engine: Callable[..., Any], model_path: Callable[[str], str]
) -> None:
    engine = batch_engine("tiny-qwen3-moe")
    before = engine.generate("Return the", REQUEST)["output_ids"]
    children = set(psutil.Process().children(recursive=True))
    for refused, message in (
        ({"device_memory": "100M"}, "^device_memory is 100.00 MiB, and "),
        ({"cpu_weight_dtype": "lossless12"}, "^cpu_weight_dtype is 'lossless12', .* give --dtype bfloat16"),
    ):
        with pytest.raises(ConfigError, match=message):
            Engine(model_path=model_path("tiny-qwen3-moe"), dtype="float32", **refused)
    assert set(psutil.Process().children(recursive=True)) <= children
    assert engine.generate("Return the", REQUEST)["output_ids"] == before


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"b_moe_decode": 0}, "b_moe_decode is 0; it must be at least 1"),
        ({"b_attn_decode": 600, "b_moe_decode": 512}, "cannot be larger than its group"),
        ({"page_size": 1}, "pages of at least 2 tokens"),
        ({"tp_size": 2}, "give --tp 2 --dp 2 --ep 2 --enable-dp-attention"),
        ({"disable_radix_cache": False}, "needs True"),
        ({"boundary_tokens": "x"}, "takes a value of type int"),
    ],
)
def test_arguments_that_cannot_work_are_refused_before_anything_starts(
    kwargs: dict[str, Any], message: str, model_path: Callable[[str], str]
) -> None:
    with pytest.raises(ConfigError, match=message):
        Engine(model_path=model_path("tiny-qwen3-moe"), **kwargs)
