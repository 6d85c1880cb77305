"""Each family's tokens are Hugging Face's, however groups are cut and wherever KV and experts are kept."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from sgl_batch import Engine
from sgl_batch.errors import ConfigError
from tiny_models.random_checkpoints import FORMS, HUB, TRANSFORMERS, make_checkpoint
from tiny_models.random_families import FAMILIES, RandomFamily

from .conftest import Traces
from .greedy_proof import Requests, check_greedy, make_requests
from .interpreter import TRITON, interpret_triton
from .shared_prompts import counted
from .test_ranks import ranks

pytestmark = pytest.mark.engine

PAGE = 8
SUB_BATCH = 2
# Groups are cut, prompts form several groups, and the device holds the KV of few prompts at a time.
SMALL: dict[str, Any] = {
    "dtype": "float32",
    "page_size": PAGE,
    "boundary_tokens": PAGE,
    "b_moe_prefill": 160,
    "b_moe_decode": 8,
    "b_attn_prefill": 3 * PAGE + 1,
    "b_attn_decode": SUB_BATCH,
    "max_total_tokens": 30 * PAGE,
}
STORE: dict[str, Any] = {"kv_store_bytes": 64 << 20, "kv_store_checksums": True, "decode_kv": "resident"}
MIXED = {"mix_prefill": 2 * PAGE, "b_moe_decode": 4, "b_attn_decode": 3, "ready_ahead": 0.0}
SAMPLED = {"temperature": 0.8, "sampling_seed": 7, "n": 2, "max_new_tokens": 12, "ignore_eos": True}
# Their decode KV is streamed, so that no pass runs from a record.
STREAMED = ("qwen2", "mistral")
EXPERTS = tuple(family for family in FAMILIES if family.experts)

named = pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
with_experts = pytest.mark.parametrize("family", EXPERTS, ids=lambda family: family.name)


@pytest.fixture(scope="session")
def requests() -> Requests:
    return make_requests(PAGE)


@pytest.fixture
def checkpoint(tmp_path: Path, repo_root: Path) -> Callable[[RandomFamily, str], str]:
    return lambda family, form: make_checkpoint(family, form, tmp_path, repo_root / "test" / "models/tiny-qwen3-moe")


def greedy(engine: Any, requests: Requests) -> list[list[int]]:
    results = engine.generate(input_ids=requests.input_ids, sampling_params=requests.sampling_params)
    return [result["output_ids"] for result in results]


def sampled(engine: Any, prompts: list[list[int]]) -> list[list[int]]:
    """Return two sampled choices of each prompt."""
    return [r["output_ids"] for r in engine.generate(input_ids=prompts, sampling_params=[SAMPLED] * len(prompts))]


def check_coroutine_forward(engine: Any, counts: dict[str, int]) -> None:
    """Check that the coroutine forward computed every pass."""
    assert engine.running["forward"] == "coroutine"
    assert counts.get("forwards_by_sglang", 0) == 0
    assert counts["prefill_groups"] > 0


@named
def test_tokens_are_huggingfaces_in_sub_batches_and_whole_groups_with_a_store_of_shared_prefixes(
    family: RandomFamily, checkpoint: Callable[[RandomFamily, str], str], requests: Requests, traces: Traces
) -> None:
    path = checkpoint(family, HUB)
    store = {**STORE, "decode_kv": "streamed"} if family.name in STREAMED else STORE
    engine = Engine(model_path=path, **SMALL, **store, **traces.new())
    try:
        outputs, counts = counted(engine, lambda: greedy(engine, requests))
        check_greedy(checkpoint(family, TRANSFORMERS), requests, outputs)
        check_coroutine_forward(engine, counts)
        layers = AutoConfig.from_pretrained(path).num_hidden_layers
        groups = counts["prefill_groups"] + counts["decode_groups"]
        assert counts["attention_calls"] > 1.2 * layers * groups, "groups were cut"
        assert counts["prompt_tokens_shared"] > 0, "prompts begin alike"
        assert counts.get("pages_restored", 0) + counts.get("streamed_steps", 0) > 0, "KV came from the store"
        two = sampled(engine, [requests.input_ids[3], requests.input_ids[7]])
        assert two[0] != two[1], "choices of one prompt differ"
        engine.set_plan(b_attn_prefill=160, b_attn_decode=8)
        assert greedy(engine, requests) == outputs, "outputs are the same in whole groups"
        assert sampled(engine, [requests.input_ids[7]]) == two[2:], "a seed gives the same tokens, whatever else runs"
        recorded = engine.batch_stats()["counters"].get("recorded_passes", 0)
        assert (recorded > 0) == (family.name not in STREAMED), "decode passes run from a record"
        engine.set_plan(**MIXED)
        assert greedy(engine, requests) == outputs, "outputs are the same where decode steps compute prompts"
        assert engine.batch_stats()["counters"]["prompt_tokens_mixed"] > 0
        assert engine.batch_stats()["counters"]["recomputed_tokens_unplanned"] == 0
    finally:
        engine.shutdown()


@with_experts
def test_tokens_of_two_ranks_that_stream_experts_are_huggingfaces(
    family: RandomFamily, checkpoint: Callable[[RandomFamily, str], str], requests: Requests, traces: Traces
) -> None:
    path = checkpoint(family, TRANSFORMERS)
    engine = Engine(model_path=path, **SMALL, **ranks(2), weights="streamed", **traces.new())
    try:
        check_greedy(path, requests, greedy(engine, requests))
        stats = engine.batch_stats()
        check_coroutine_forward(engine, stats["counters"])
        assert all(rank["counters"]["weights_read"] > 0 for rank in stats["ranks"]), "each reads its own experts"
        assert all(rank["counters"]["output_tokens"] > 0 for rank in stats["ranks"])
    finally:
        engine.shutdown()


def test_a_sliding_window_that_sglangs_model_ignores_is_refused(
    checkpoint: Callable[[RandomFamily, str], str],
) -> None:
    mistral = next(family for family in FAMILIES if family.name == "mistral")
    windowed = replace(mistral, name="windowed", settings={**mistral.settings, "sliding_window": 5 * PAGE})
    with pytest.raises(ConfigError, match=f"--context-length {5 * PAGE} or less"):
        Engine(model_path=checkpoint(windowed, HUB), **SMALL)


def test_each_of_two_ranks_holds_a_whole_model_without_experts(
    checkpoint: Callable[[RandomFamily, str], str], requests: Requests, traces: Traces
) -> None:
    path = checkpoint(next(family for family in FAMILIES if not family.experts), TRANSFORMERS)
    engine = Engine(model_path=path, **SMALL, **ranks(2), **traces.new())
    try:
        check_greedy(path, requests, greedy(engine, requests))
        stats = engine.batch_stats()
        check_coroutine_forward(engine, stats["counters"])
        assert stats["counters"]["sequences_arrived"] > 0, "sequences moved"
        assert all(rank["counters"]["output_tokens"] > 0 for rank in stats["ranks"])
    finally:
        engine.shutdown()


def test_the_gpus_attention_and_experts_support_windows_sinks_and_biases(
    checkpoint: Callable[[RandomFamily, str], str], requests: Requests, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It runs under Triton's interpreter, with pages that move between a store and the device."""
    interpret_triton(monkeypatch)
    path = checkpoint(next(family for family in FAMILIES if family.name == "gpt-oss"), HUB)
    few = Requests(input_ids=[prompt[:60] for prompt in requests.input_ids[4:8]], output_lengths=[4, 5, 3, 5])
    settings = {**SMALL, **TRITON, "expert_runner": "triton", "device": "cpu", "kv_store_bytes": 64 << 20}
    engine = Engine(model_path=path, **settings)
    try:
        assert engine.running["classes"]["attention"] == "TritonAttention"
        check_greedy(path, few, greedy(engine, few))
    finally:
        engine.shutdown()


@named
def test_a_published_config_is_read_as_the_one_that_transformers_writes(
    family: RandomFamily, checkpoint: Callable[[RandomFamily, str], str]
) -> None:
    written, published = (AutoConfig.from_pretrained(checkpoint(family, form)) for form in FORMS)
    settings = [
        name for name in written.to_dict() if name not in ("_name_or_path", "torch_dtype", *family.read_otherwise)
    ]
    assert {name: getattr(published, name) for name in settings} == {name: getattr(written, name) for name in settings}
