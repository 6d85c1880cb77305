"""With experts read from the checkpoint while the model runs, tokens are the same and errors name the file."""

from __future__ import annotations

import asyncio
import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from safetensors.torch import load_file

from sgl_batch import Engine
from sgl_batch.errors import ConfigError, EngineError

from .conftest import FAMILIES

pytestmark = pytest.mark.engine

QWEN, MIXTRAL, DEEPSEEK = FAMILIES
SMALL = {"page_size": 8, "boundary_tokens": 8, "b_moe_decode": 16, "b_moe_prefill": 300, "b_attn_prefill": 64}
STREAMED = {"dtype": "bfloat16", "max_total_tokens": 8192, "weights": "streamed", **SMALL}
HIDDEN = 128  # of all three models
QWEN_EXPERT_BYTES, MIXTRAL_EXPERT_BYTES = 3 * 96 * HIDDEN * 2, 3 * 192 * HIDDEN * 2
QWEN_RING = 2 * 16 * QWEN_EXPERT_BYTES  # two layers
# Two layers of eight experts, and four experts that stay of each of the two other layers.
MIXTRAL_MEMORY = (2 * 8 + 2 * 4) * MIXTRAL_EXPERT_BYTES
TWO_RANKS = {"tp_size": 2, "dp_size": 2, "ep_size": 2, "enable_dp_attention": True, "rank_timeout_s": 60.0}


@pytest.fixture
def started(model_path: Callable[[str], str]) -> Iterator[Callable[..., Any]]:
    """Return a function that starts engines which end with the test."""
    engines: list[Any] = []

    def start(family: str, **kwargs: Any) -> Any:
        engines.append(Engine(model_path=model_path(family), **kwargs))
        return engines[-1]

    yield start
    for engine in engines:
        engine.shutdown()


def answers(engine: Any) -> list[list[int]]:
    """Return the answers to random prompts, prefilled in several groups; every third is sampled with a seed."""
    draw = random.Random(0)
    ids = [[draw.randrange(5, 3000) for _ in range(draw.choice((1, 3, 8, 9, 23, 64)))] for _ in range(40)]
    parameters = []
    for index in range(40):
        sampling = {"temperature": 0} if index % 3 else {"temperature": 1.0, "sampling_seed": index}
        parameters.append({**sampling, "max_new_tokens": draw.choice((1, 9, 24, 60)), "ignore_eos": True})
    return [result["output_ids"] for result in engine.generate(input_ids=ids, sampling_params=parameters)]


def test_tokens_are_the_same_in_a_ring_of_two_layers_with_a_kv_store_and_on_two_ranks(
    batch_engine: Callable[..., Any], started: Callable[..., Any]
) -> None:
    expected = answers(batch_engine(QWEN, dtype="bfloat16", **SMALL))
    ring = started(
        QWEN, **{**STREAMED, "max_total_tokens": 8 * 20, "kv_store_bytes": 64 << 20, "weight_memory": QWEN_RING}
    )
    assert answers(ring) == expected
    counters = ring.batch_stats()["counters"]
    assert counters["weights_kept"] == 0, "no expert stays in a ring of two layers"
    assert counters.get("suspensions", 0) > 0, "sequences were suspended, too"
    ring.shutdown()
    ranks = started(QWEN, **STREAMED, **TWO_RANKS)
    assert answers(ranks) == expected
    for rank in ranks.batch_stats()["ranks"]:
        read = rank["counters"]["weights_read"]
        assert 0 < read <= 4 * 16 // 2, "each rank reads its own share, and no expert twice where memory is free"


def test_tokens_are_the_same_where_some_experts_stay(
    batch_engine: Callable[..., Any], started: Callable[..., Any]
) -> None:
    expected = answers(batch_engine(MIXTRAL, dtype="bfloat16", **SMALL))
    engine = started(MIXTRAL, **STREAMED, weight_memory=MIXTRAL_MEMORY)
    assert answers(engine) == expected
    counters = engine.batch_stats()["counters"]
    assert 0 < counters["weights_kept"] < counters["weights_routed"]


def test_weights_rounded_to_int8_as_they_are_read_give_the_tokens_of_resident_int8(
    batch_engine: Callable[..., Any], started: Callable[..., Any]
) -> None:
    expected = answers(batch_engine(DEEPSEEK, dtype="bfloat16", cpu_weight_dtype="int8", **SMALL))
    assert answers(started(DEEPSEEK, **STREAMED, cpu_weight_dtype="int8")) == expected


@pytest.fixture
def copied(model_path: Callable[[str], str], tmp_path: Path) -> Path:
    """A copy of a checkpoint."""
    return Path(shutil.copytree(model_path(QWEN), tmp_path / QWEN))


def check_bytes_read(engine: Any) -> None:
    """Check that a single sequence reads each expert that it is routed to once for each token."""
    counted = []
    for _ in range(2):
        engine.generate(input_ids=[7, 8, 9], sampling_params={"temperature": 0, "max_new_tokens": 20})
        counted.append(engine.batch_stats()["counters"])
    new = {name: counted[1][name] - counted[0].get(name, 0) for name in counted[1]}
    assert new["weights_read"] == new["weights_routed"] == new["expert_gemms"] > 0
    assert new["weights_bytes_read"] == new["weights_read"] * QWEN_EXPERT_BYTES
    assert counted[1]["weights_unrouted"] == 0


def check_updates_are_refused(engine: Any, checkpoint: Path) -> None:
    request = {"input_ids": [7, 8, 9], "sampling_params": {"temperature": 0, "max_new_tokens": 20}}
    expected = engine.generate(**request)["output_ids"]
    name = "model.layers.0.mlp.experts.0.gate_proj.weight"
    weight = load_file(checkpoint / "model.safetensors")[name]
    for refused in (
        engine.update_weights_from_disk(str(checkpoint)),
        engine.update_weights_from_tensor([(name, weight + 1)]),
    ):
        success, message = (
            (refused[0], refused[1]) if isinstance(refused, tuple) else (refused.success, refused.message)
        )
        assert not success
        assert "weights cannot be changed" in message
        assert "--weights resident" in message
    assert engine.get_weights_by_name(name) is None
    assert engine.get_weights_by_name("model.layers.0.mlp.experts.w13_weight") is None
    with pytest.raises(AssertionError, match="the model cannot be saved"):
        engine.save_sharded_model(path=str(checkpoint), pattern=None, max_size=None)
    assert engine.generate(**request)["output_ids"] == expected


def test_a_file_cut_short_while_the_engine_runs_ends_it_with_an_error_that_names_the_file(copied: Path) -> None:
    engine = Engine(model_path=str(copied), **STREAMED, weight_memory=QWEN_RING)
    children = engine.own_processes
    assert len(children) >= 2
    try:
        check_bytes_read(engine)
        check_updates_are_refused(engine, copied)
        line_engine = engine.line_engine()
        body = {"model": engine.tokenizer_manager.served_model_name, "max_tokens": 500, "ignore_eos": True}

        async def cut_short_in_the_middle() -> list[Any]:
            requests = [
                asyncio.ensure_future(line_engine.respond("/v1/completions", {**body, "prompt": "Return the"}))
                for _ in range(6)
            ]
            before = (await line_engine.stats()).counters["weights_read"]
            while (await line_engine.stats()).counters["weights_read"] == before:
                pass
            os.truncate(copied / "model.safetensors", 100_000)
            return await asyncio.wait_for(asyncio.gather(*requests, return_exceptions=True), 60)

        for error in engine.loop.run_until_complete(cut_short_in_the_middle()):
            assert isinstance(error, EngineError), error
            message = f"weights of the model could not be read: {copied}/model.safetensors has only 100000 bytes"
            assert message in str(error)
            assert "something has cut it short" in str(error)
    finally:
        engine.shutdown()
    _, alive = psutil.wait_procs(children, timeout=30)
    assert alive == []


def test_too_little_weight_memory_is_refused_with_the_numbers(
    started: Callable[..., Any],
) -> None:
    given, layer = 15 * QWEN_EXPERT_BYTES, 16 * QWEN_EXPERT_BYTES
    with pytest.raises(ConfigError, match=rf"^weight_memory is {given} bytes; .* {layer} bytes: give"):
        started(QWEN, **STREAMED, weight_memory=given)
