"""What a GPU runs, on a GPU or, where there is none, on a CPU: SGLang's pools, and its Triton attention under Triton's
interpreter. Tokens are those of a CPU's own attention.

Short prompts and few tokens: the interpreter takes a hundred times as long.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from sgl_batch import Engine

from .interpreter import TRITON, interpret_triton

# Sequences that begin alike, that end inside a page and at its end, and that are cut by sub-batches of 40 rows.
LENGTHS = (5, 47, 64, 75)
TOKENS = 5
ON_GPU = torch.cuda.is_available()
SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "page_size": 16,
    "b_moe_prefill": 120,
    "b_attn_prefill": 40,
    "b_moe_decode": 4,
    "b_attn_decode": 3,
    "boundary_tokens": 4,
}
STORE = {"kv_store_bytes": 64 << 20, "max_total_tokens": 160}
FORMS: dict[str, dict[str, Any]] = {
    "without a store": {"max_total_tokens": 2048},
    "inclusive": {**STORE, "kv_store_mode": "inclusive", "decode_kv": "resident"},
}


@pytest.fixture(scope="module")
def input_ids(prompts: Any) -> list[list[int]]:
    source = max(prompts.input_ids, key=len)
    ids = [source[7 * index :][:length] for index, length in enumerate(LENGTHS)]
    ids[3][:64] = ids[2]
    return ids


def answers(engine: Any, input_ids: list[list[int]]) -> list[list[int]]:
    """Greedy answers to all, then three sampled ones to one prompt."""
    greedy = {"temperature": 0, "max_new_tokens": TOKENS, "ignore_eos": True}
    sampled = {"temperature": 0.9, "max_new_tokens": 3, "ignore_eos": True, "n": 3, "sampling_seed": 11}
    found = engine.generate(input_ids=input_ids, sampling_params=greedy)
    found += engine.generate(input_ids=input_ids[1:2], sampling_params=sampled)
    return [one["output_ids"] for one in found]


@pytest.fixture(scope="module")
def expected(batch_engine: Callable[..., Any], input_ids: list[list[int]]) -> list[list[int]]:
    """Those of the engine of a CPU, which the parity suite holds against Hugging Face and stock SGLang."""
    on_cpu = {"device": "cpu"} if ON_GPU else {}
    return answers(batch_engine("tiny-qwen3-moe", **on_cpu), input_ids)


@pytest.fixture(params=FORMS)
def gpu_form(request: Any, model_path: Callable[[str], str], monkeypatch: Any) -> Iterator[Any]:
    if not ON_GPU:
        interpret_triton(monkeypatch)
    device = "cuda" if ON_GPU else "cpu"
    settings = {**SETTINGS, **FORMS[request.param]}
    engine = Engine(model_path=model_path("tiny-qwen3-moe"), device=device, **TRITON, **settings)
    yield engine
    engine.shutdown()


def test_tokens_are_those_of_the_cpus_own_attention(gpu_form: Any, input_ids: Any, expected: Any, request: Any) -> None:
    form = request.node.callspec.params["gpu_form"]
    assert gpu_form.running["classes"]["attention"] == "TritonAttention"
    assert gpu_form.running["classes"]["kv_pool"] == "GpuPagePool"
    assert answers(gpu_form, input_ids) == expected
    state = gpu_form.get_server_info()["internal_states"][0]["sgl_batch"]
    counters = state["counters"]
    assert counters["prompts_shared"] > 0
    assert counters["attention_calls"] > 4 * (counters["decode_groups"] + counters["prefill_groups"]), "none was cut"
    if "store" not in form:
        assert counters["pages_restored"] > 0
        assert state["store"]["free_pages"] == state["store"]["total_pages"]
