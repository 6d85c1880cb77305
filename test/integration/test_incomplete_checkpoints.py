"""A checkpoint that does not fit its model is refused by name; SGLang alone would answer with wrong tokens."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from sgl_batch import Engine
from sgl_batch.errors import ConfigError

pytestmark = pytest.mark.engine

EXPERT = "model.layers.1.mlp.experts.2.down_proj.weight"
SHARED = "model.layers.0.mlp.shared_expert.down_proj.weight"


def test_a_missing_expert_and_an_expert_that_the_model_does_not_have_are_named(
    model_path: Callable[[str], str], tmp_path: Path
) -> None:
    shutil.copytree(model_path("tiny-qwen3-moe"), tmp_path / "model")
    (file,) = (tmp_path / "model").glob("*.safetensors")
    tensors = load_file(file)
    missing_weight = tensors.pop(EXPERT)
    # This family has no shared experts.
    save_file(tensors | {SHARED: missing_weight}, file, metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"^the checkpoint and SGLang") as refused:
        Engine(model_path=str(tmp_path / "model"), dtype="float32", max_total_tokens=4096)
    missing = "model.layers.1.mlp.experts.w2_weight (experts 2)"
    assert f"it has nothing for 1 parameters of the model: {missing}; " in str(refused.value)
    assert f"the model has no place for 1 of its tensors: {SHARED}. " in str(refused.value)
