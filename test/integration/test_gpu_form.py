"""The engine's form on a GPU: SGLang's pools, and its Triton attention under our layer loop.

Without a GPU it runs on a CPU under Triton's interpreter, in float32, and must give the tokens of the CPU's own
attention; prompts are short and tokens few, as the interpreter takes a hundred times as long. On a GPU it runs in
bfloat16 and float16, the number types that SGLang's kernels for GPUs compute in, with heads of 64 channels, and greedy
tokens must be stock SGLang's on the same GPU, up to near ties. `scripts/gpu_bringup` tests all else that needs a GPU.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from sgl_batch import Engine
from sgl_batch.sglang_adapter.stock_engine import StockEngine

from .interpreter import TRITON, interpret_triton

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))
from bringup.prompts import Requests, generate, reference_of_engine
from bringup.tokens import NEAR_TIE, Reference, compare
from tiny_models.random_models import make_random_model

# Some prompts begin alike, end inside a page or at its end, or are cut by sub-batches of 20 rows.
LENGTHS = (5, 27, 32, 43)
TOKENS = 5
SAMPLED = {"temperature": 0.9, "max_new_tokens": 3, "ignore_eos": True, "n": 3, "sampling_seed": 11}
ON_GPU = torch.cuda.is_available()
DTYPES = ("bfloat16", "float16") if ON_GPU else ("float32",)
SETTINGS: dict[str, Any] = {
    "page_size": 16,
    "b_moe_prefill": 60,
    "b_attn_prefill": 20,
    "b_moe_decode": 4,
    "b_attn_decode": 3,
    "boundary_tokens": 4,
}
STORE = {"kv_store_bytes": 64 << 20, "max_total_tokens": 112}
FORMS: dict[str, dict[str, Any]] = {
    "without a store": {"max_total_tokens": 2048},
    "inclusive": {**STORE, "kv_store_mode": "inclusive", "decode_kv": "resident"},
}
if not ON_GPU:  # whose engine chooses its runner itself
    FORMS["experts of Triton"] = {"max_total_tokens": 2048, "expert_runner": "triton"}


@dataclass(frozen=True)
class Expected:
    """The greedy answers, up to near ties of this size, and the sampled ones, or None if they are not known."""

    greedy: Reference
    near_tie: float
    sampled: list[list[int]] | None = None


@pytest.fixture(scope="module")
def requests(prompts: Any) -> Requests:
    source = max(prompts.input_ids, key=len)
    ids = [source[7 * index :][:length] for index, length in enumerate(LENGTHS)]
    ids[3][:32] = ids[2]
    return Requests(ids, [TOKENS] * len(ids))


def sampled(engine: Any, requests: Requests) -> list[list[int]]:
    """Return three sampled answers to one prompt."""
    found = engine.generate(input_ids=requests.input_ids[1:2], sampling_params=SAMPLED)
    return [one["output_ids"] for one in found]


@pytest.fixture(scope="module", params=DTYPES)
def dtype(request: Any) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def model(model_path: Callable[[str], str], tmp_path_factory: pytest.TempPathFactory) -> str:
    trained = model_path("tiny-qwen3-moe")
    if not ON_GPU:
        return trained
    return str(make_random_model("qwen3-moe", tmp_path_factory.mktemp("models"), Path(trained)))


@pytest.fixture(scope="module")
def expected(dtype: str, model: str, batch_engine: Callable[..., Any], requests: Requests) -> Expected:
    if ON_GPU:
        return stock_reference(model, dtype, requests)
    # test_parity.py compares the engine of a CPU with Hugging Face and stock SGLang.
    engine = batch_engine("tiny-qwen3-moe")
    tokens = generate(engine, requests)
    return Expected(Reference(tokens, [[[]] * TOKENS] * len(tokens)), 0.0, sampled(engine, requests))


def stock_reference(model: str, dtype: str, requests: Requests) -> Expected:
    """Return the greedy answers of stock SGLang on the same device. It samples differently, so nothing is sampled."""
    engine = StockEngine(model_path=model, dtype=dtype, max_total_tokens=2048, disable_radix_cache=True)
    try:
        return Expected(reference_of_engine(engine, requests), NEAR_TIE)
    finally:
        engine.shutdown()


@pytest.fixture(params=FORMS)
def gpu_form(request: Any, dtype: str, model: str, monkeypatch: Any) -> Iterator[Any]:
    if not ON_GPU:
        interpret_triton(monkeypatch)
    device = "cuda" if ON_GPU else "cpu"
    engine = Engine(model_path=model, dtype=dtype, device=device, **TRITON, **SETTINGS, **FORMS[request.param])
    yield engine
    engine.shutdown()


def test_tokens_are_those_of_the_reference(
    gpu_form: Any, requests: Requests, expected: Expected, request: pytest.FixtureRequest
) -> None:
    form = request.node.callspec.params["gpu_form"]
    assert gpu_form.running["classes"]["attention"] == "TritonAttention"
    assert gpu_form.running["classes"]["kv_pool"] == "GpuPagePool"
    if not ON_GPU:
        runner = FORMS[form].get("expert_runner", "native")
        assert gpu_form.plan_manifest()["expert_runner"] == runner
    agreement = compare(generate(gpu_form, requests), expected.greedy, expected.near_tie)
    assert agreement.holds, agreement.why_not
    # Interpreted experts take seconds a step, and greedy answers have shown them.
    samples = "expert_runner" not in FORMS[form]
    if samples:
        choices = sampled(gpu_form, requests)
        assert [len(one) for one in choices] == [SAMPLED["max_new_tokens"]] * 3
        assert expected.sampled in (None, choices)
    state = gpu_form.get_server_info()["internal_states"][0]["sgl_batch"]
    counters = state["counters"]
    assert (counters.get("prompts_shared", 0) > 0) == samples
    assert counters["expert_calls"] > 0
    assert counters["attention_calls"] > 4 * (counters["decode_groups"] + counters["prefill_groups"]), "no cut"
    if form == "inclusive":
        assert counters["pages_restored"] > 0
        assert state["store"]["free_pages"] == state["store"]["total_pages"]
