"""DeepSeek-V2 has what the trained checkpoint of V3 lacks: softmax scores, the best group, plain queries."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2Moe

from tiny_models.random_checkpoints import TRANSFORMERS, make_checkpoint
from tiny_models.random_families import DEEPSEEK_V2

from .conftest import Prompts, greedy_reference
from .test_parity import generate

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def random_model(tmp_path_factory: pytest.TempPathFactory, model_path: Callable[[str], str]) -> str:
    tokenizer = Path(model_path("tiny-deepseek-v3"))
    return make_checkpoint(DEEPSEEK_V2, TRANSFORMERS, tmp_path_factory.mktemp("models"), tokenizer)


def test_float32_greedy_tokens_equal_huggingface(
    random_model: str, batch_engine: Callable[..., Any], prompts: Prompts, monkeypatch: pytest.MonkeyPatch
) -> None:
    # transformers reads this attribute of its block of experts and never sets it.
    monkeypatch.setattr(DeepseekV2Moe, "num_experts", property(lambda moe: moe.experts.num_experts), raising=False)
    expected = greedy_reference(random_model, torch.float32, prompts).tokens
    assert len({token for tokens in expected for token in tokens}) > 20, "the model does not repeat itself"
    assert generate(batch_engine(random_model, 7), prompts) == expected
