"""DeepSeek-V2's form, which the trained checkpoint of V3 lacks: softmax scores, the best group, plain queries."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DeepseekV2Config, DeepseekV2ForCausalLM
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2Moe

from .conftest import Prompts, greedy_reference
from .test_parity import generate

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def random_model(tmp_path_factory: pytest.TempPathFactory, model_path: Callable[[str], str]) -> str:
    """A random checkpoint of two layers, with weights so large that best logits lie apart."""
    path = tmp_path_factory.mktemp("deepseek-v2")
    config = DeepseekV2Config(
        vocab_size=3072,
        hidden_size=64,
        intermediate_size=96,
        moe_intermediate_size=32,
        num_hidden_layers=2,
        first_k_dense_replace=1,
        num_attention_heads=4,
        q_lora_rank=None,
        kv_lora_rank=32,
        qk_nope_head_dim=16,
        qk_rope_head_dim=8,
        v_head_dim=24,
        n_routed_experts=16,
        n_shared_experts=1,
        num_experts_per_tok=4,
        topk_method="group_limited_greedy",
        scoring_func="softmax",
        n_group=4,
        topk_group=2,
        norm_topk_prob=False,
        routed_scaling_factor=8.0,
        moe_layer_freq=1,
        max_position_embeddings=4096,
        initializer_range=0.2,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )
    torch.manual_seed(0)
    DeepseekV2ForCausalLM(config).save_pretrained(path)
    for file in Path(model_path("tiny-deepseek-v3")).glob("*token*"):
        shutil.copy(file, path)
    return str(path)


def test_float32_greedy_tokens_equal_huggingface(
    random_model: str, batch_engine: Callable[..., Any], prompts: Prompts, monkeypatch: pytest.MonkeyPatch
) -> None:
    # transformers reads this number of its block of experts without ever setting it.
    monkeypatch.setattr(DeepseekV2Moe, "num_experts", property(lambda moe: moe.experts.num_experts), raising=False)
    expected = greedy_reference(random_model, torch.float32, prompts).tokens
    assert len({token for tokens in expected for token in tokens}) > 20, "the model does not repeat itself"
    assert generate(batch_engine(random_model, 7), prompts) == expected
