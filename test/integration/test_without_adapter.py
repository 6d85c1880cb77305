"""A plain decoder without an adapter runs through SGLang's own forward pass, gives the right tokens and reports it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GraniteMoeConfig, Phi3Config, PretrainedConfig

from sgl_batch import Engine
from sgl_batch.errors import ConfigError

from .conftest import FAMILIES, Prompts, Traces, greedy_reference
from .test_ranks import ranks

pytestmark = pytest.mark.engine

NUMBERS: dict[str, Any] = {
    "vocab_size": 3072,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "initializer_range": 0.2,
    "pad_token_id": 0,
}
# One with fused projections, and one with experts and multipliers of its own.
CONFIGS: dict[str, Callable[[], PretrainedConfig]] = {
    "Phi3ForCausalLM": lambda: Phi3Config(**NUMBERS),
    "GraniteMoeForCausalLM": lambda: GraniteMoeConfig(
        **NUMBERS, num_local_experts=8, num_experts_per_tok=2, embedding_multiplier=2.0, residual_multiplier=0.5
    ),
}
SETTINGS: dict[str, Any] = {"dtype": "float32", "page_size": 16, "b_moe_prefill": 700, "b_moe_decode": 8}
# A store larger than the device, whose pages hold eight short prompts but not their answers.
STORED: dict[str, Any] = {
    "page_size": 8,
    "max_total_tokens": 8 * 48,
    "boundary_tokens": 8,
    "kv_store_bytes": "1M",
    "kv_store_checksums": True,
}


@pytest.mark.parametrize(
    ("architecture", "num_ranks", "stored"),
    [("Phi3ForCausalLM", 2, False), ("Phi3ForCausalLM", 2, True), ("GraniteMoeForCausalLM", 1, True)],
    scope="module",
)
def test_float32_greedy_tokens_equal_huggingface_and_the_missing_adapter_is_reported(
    architecture: str,
    num_ranks: int,
    stored: bool,
    tmp_path: Path,
    model_path: Callable[[str], str],
    traces: Traces,
    capfd: pytest.CaptureFixture[str],
) -> None:
    path, prompts = random_model(architecture, tmp_path, model_path(FAMILIES[0])), prompts_that_begin_alike()
    expected = greedy_reference(path, torch.float32, prompts).tokens
    assert len({token for tokens in expected for token in tokens}) > 20, "the model does not repeat itself"
    with pytest.raises(ConfigError, match=rf"kv_store_mode is 'inclusive', and {architecture} has no family adapter"):
        Engine(model_path=path, **SETTINGS, kv_store_bytes="1M", kv_store_mode="inclusive")
    own = ranks(num_ranks) if num_ranks > 1 else {}
    memory = STORED if stored else {"max_total_tokens": 4096}
    engine = Engine(model_path=path, **{**SETTINGS, **memory}, **own, **traces.new())
    try:
        forward = f"sglang (no adapter for {architecture})"
        assert f"] forward: {forward}\n" in capfd.readouterr().err
        results = engine.generate(input_ids=prompts.input_ids, sampling_params=prompts.sampling_params)
        assert [result["output_ids"] for result in results] == expected
        stats = engine.batch_stats()
        assert stats["forward"] == engine.plan_manifest()["forward"] == forward
        if stored:
            check_store(engine, prompts, expected)
        else:
            assert stats["counters"]["prompt_tokens_shared"] > 0
        if num_ranks > 1:
            assert stats["counters"]["sequences_arrived"] > 0, "sequences moved"
            assert all(rank["counters"]["output_tokens"] > 0 for rank in stats["ranks"])
    finally:
        engine.shutdown()


def check_store(engine: Any, prompts: Prompts, expected: list[list[int]]) -> None:
    """Check that sequences that outgrow the device leave it whole, come back, and are not computed again.

    `prompts` have been answered once.
    """
    short, number = slice(1, 3), 8
    choices = [{**parameters, "n": number} for parameters in prompts.sampling_params[short]]
    made = engine.generate(input_ids=prompts.input_ids[short], sampling_params=choices)
    assert [one["output_ids"] for one in made] == [tokens for tokens in expected[short] for _ in range(number)]
    stats = engine.batch_stats()
    counters = stats["counters"]
    computed = prompts.input_ids + number * prompts.input_ids[short]
    assert stats["choices"]["decode_kv"]["why"].startswith("resident: this model has no family adapter")
    assert stats["store"]["exclusive"]
    assert counters["suspensions"] > 0
    assert counters["pages_restored"] == counters["pages_copied_to_suspend"] > counters["suspensions"]
    assert counters["prompts_prefilled_on_device"] == len(computed)
    assert counters["prompt_tokens"] == sum(map(len, computed))
    of_choices = (number - 1) * sum(map(len, prompts.input_ids[short]))
    assert counters["recomputed_tokens_planned"] == of_choices, "each choice computes its prompt once"
    assert counters["recomputed_tokens_unplanned"] == 0
    assert stats["store"]["free_pages"] == stats["store"]["total_pages"]
    assert stats["free_pages"] == stats["total_pages"]


def random_model(architecture: str, path: Path, tokenizer: str) -> str:
    """Make a random checkpoint of two layers. Norms of one and biases of zero would hide one left out: none is."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[architecture]()).float()
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.1 * torch.randn_like(weight) if weight.ndim == 1 else 0.0
    model.save_pretrained(path)
    for file in Path(tokenizer).glob("*token*"):
        shutil.copy(file, path)
    return str(path)


def prompts_that_begin_alike() -> Prompts:
    tokens = torch.randint(10, 3000, (400,), generator=torch.Generator().manual_seed(1)).tolist()
    input_ids = [tokens[:n] for n in (1, 5, 17, 64)] + [tokens[:150] + tokens[200 + i : 210 + i] for i in range(3)]
    return Prompts(input_ids, [{"temperature": 0, "max_new_tokens": 48, "ignore_eos": True}] * len(input_ids))
