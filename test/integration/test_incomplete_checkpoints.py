"""A checkpoint that does not fit its model is refused by name, where SGLang alone would answer with wrong tokens."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from sgl_batch import Engine
from sgl_batch.errors import ConfigError

pytestmark = pytest.mark.engine

EXPERT = "model.layers.1.mlp.experts.2.down_proj.weight"
DENSE = "model.layers.0.mlp.gate_proj.weight"


def test_a_lost_expert_and_a_layer_that_sglang_reads_otherwise_are_named(
    model_path: Callable[[str], str], tmp_path: Path
) -> None:
    shutil.copytree(model_path("tiny-qwen3-moe"), tmp_path / "model")
    (file,) = (tmp_path / "model").glob("*.safetensors")
    tensors = load_file(file)
    lost = tensors.pop(EXPERT)
    # SGLang knows no dense layers of this family.
    first = {name for name in tensors if name.startswith("model.layers.0.mlp.")}
    tensors = {name: tensor for name, tensor in tensors.items() if name not in first} | {DENSE: lost}
    save_file(tensors, file, metadata={"format": "pt"})
    config = tmp_path / "model" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "mlp_only_layers": [0]}))
    with pytest.raises(ConfigError, match=r"^the checkpoint and SGLang") as refused:
        Engine(model_path=str(tmp_path / "model"), dtype="float32", max_total_tokens=4096)
    assert "it has nothing for 4 parameters of the model: " in str(refused.value)
    assert "model.layers.0.mlp.experts.w13_weight, " in str(refused.value)
    assert "model.layers.1.mlp.experts.w2_weight (experts 2)" in str(refused.value)
    assert f"the model has no place for 1 of its tensors: {DENSE}. " in str(refused.value)
