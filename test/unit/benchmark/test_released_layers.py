"""Layers of released models have their sizes, and a checkpoint of them is counted and read."""

from __future__ import annotations

import json

import pytest
import torch
from comparison.cpu_bound import least_work
from comparison.workload import Workload
from offline import main
from released_layers import RELEASED, Released, build, make_released_layers
from safetensors import safe_open

from sgl_batch.errors import ConfigError

# Layers, vocabulary, and parameters as their publishers count them, in 1e9.
PUBLISHED = {
    "qwen3-30b-a3b": (48, 151936, 30.5),
    "olmoe-1b-7b": (16, 50304, 6.92),
    "mixtral-8x7b": (32, 32000, 46.7),
    "deepseek-v2-lite": (27, 102400, 15.7),
    "gpt-oss-20b": (24, 201088, 20.9),
}
SMALL = Released(
    model_type="gpt_oss",
    layers=2,
    settings={
        **RELEASED["gpt-oss-20b"].settings,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "num_local_experts": 8,
    },
)


@pytest.mark.parametrize("name", RELEASED)
def test_all_layers_together_have_the_published_number_of_parameters(name):
    layers, vocabulary, billions = PUBLISHED[name]
    with torch.device("meta"):
        model = build(name, layers, vocab_size=vocabulary)
    assert sum(parameter.numel() for parameter in model.parameters()) / 1e9 == pytest.approx(billions, rel=5e-3)


def test_a_checkpoint_whose_experts_lie_in_one_tensor_is_counted_as_others_are(monkeypatch, repo_root, tmp_path):
    monkeypatch.setitem(RELEASED, "small", SMALL)
    path = tmp_path / "model"
    parameters = make_released_layers("small", path, repo_root / "test" / "models" / "tiny-qwen3-moe", layers=2)
    hidden, width, chosen, heads = 64, 96, 4, 16 * (4 + 2)
    work = least_work(path, Workload(prompts=[[1]], output_lens=[1], description="one token"))
    layer = 3 * hidden * width * chosen + 2 * hidden * heads + hidden * 8
    assert work.flop == 2 * (2 * layer + hidden * 32000) + 2 * 4 * 4 * 16
    assert parameters > 2 * 32000 * hidden + 2 * 3 * hidden * width * 8
    with pytest.raises(ConfigError, match="already holds files"):
        make_released_layers("small", path, repo_root, layers=2)


def test_each_layer_is_counted_with_its_own_window(monkeypatch, repo_root, tmp_path):
    monkeypatch.setitem(RELEASED, "small", SMALL)
    path = tmp_path / "model"
    make_released_layers("small", path, repo_root / "test" / "models" / "tiny-qwen3-moe", layers=2)
    workload = Workload(prompts=[[1] * 200], output_lens=[2], description="a prompt longer than the window of 128")
    windowed = least_work(path, workload)
    step = windowed.steps[0].parts[0]
    assert (step.flop, step.read_bytes) == (4 * 4 * 16 * (128 + 201), 2 * 2 * 2 * 16 * (128 + 201))
    config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    assert config["layer_types"] == ["sliding_attention", "full_attention"]
    config["layer_types"] = ["full_attention"] * 2
    (path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    unseen = sum(range(1, 201)) - sum(min(place, 128) for place in range(1, 201))
    assert least_work(path, workload).prompts_flop - windowed.prompts_flop == 4 * 4 * 16 * unseen


def test_a_checkpoint_has_the_vocabulary_that_is_asked_for(monkeypatch, repo_root, tmp_path):
    monkeypatch.setitem(RELEASED, "small", SMALL)
    given = "small", tmp_path / "model", repo_root / "test" / "models" / "tiny-qwen3-moe"
    with pytest.raises(ConfigError, match="--make-model-vocabulary is 31999; the tokenizer alone has 32000 tokens"):
        make_released_layers(*given, layers=2, vocabulary=31_999)
    make_released_layers(*given, layers=2, vocabulary=40_000)
    with safe_open(tmp_path / "model" / "model.safetensors", framework="np") as tensors:
        assert tensors.get_slice("lm_head.weight").get_shape() == [40_000, 64]


def test_no_layers_are_refused_with_one_line(capsys, tmp_path):
    argv = ["--make-model", str(tmp_path / "new"), "--make-model-family", "olmoe-1b-7b", "--make-model-layers", "0"]
    assert main(argv) == 1
    assert capsys.readouterr().err.count("\n") == 1
