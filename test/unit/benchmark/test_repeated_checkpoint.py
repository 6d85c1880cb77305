"""A checkpoint of one layer written many times: every tensor of the model is there, and streamed experts are found."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from gpu_comparison import repeated_checkpoint
from gpu_comparison.repeated_checkpoint import write_checkpoint
from gpu_comparison.shapes import tiny
from safetensors import safe_open

from sgl_batch.errors import ConfigError
from sgl_batch.weights.expert_checkpoint import find_experts


@pytest.fixture
def model(tmp_path):
    return write_checkpoint(tiny(3), tmp_path / "model", lambda _: None)


def read(model):
    found = {}
    for file in sorted(model.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            found |= {name: tensors.get_tensor(name) for name in tensors.keys()}  # noqa: SIM118
    return found


def test_its_tensors_are_those_of_the_model_and_have_the_shapes_bytes(model):
    from transformers import AutoConfig, AutoModelForCausalLM

    tensors = read(model)
    with torch.device("meta"):
        made = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model))
    others = {name for name in made.state_dict() if ".experts." not in name}
    assert {name for name in tensors if ".experts." not in name} == others
    norms = sum(tensor.nbytes for name, tensor in tensors.items() if "norm" in name)
    assert sum(tensor.nbytes for tensor in tensors.values()) == tiny(3).weight_bytes + norms
    assert not torch.equal(tensors["model.embed_tokens.weight"], tensors["lm_head.weight"])


def test_streamed_experts_are_found_in_a_repeated_checkpoint(model):
    files = sorted(str(file) for file in model.glob("*.safetensors"))
    names = [f"model.layers.{layer}.mlp.experts" for layer in range(3)]
    locations = find_experts(files, names, range(8))
    assert locations.file_offsets.shape[:2] == (3, 8)
    assert locations.expert_bytes == tiny(3).expert_bytes


def test_a_finished_checkpoint_of_the_shape_is_not_written_again(model):
    before = {file: file.stat().st_mtime_ns for file in model.iterdir()}
    write_checkpoint(tiny(3), model, lambda _: None)
    assert {file: file.stat().st_mtime_ns for file in model.iterdir()} == before
    write_checkpoint(tiny(2), model, lambda _: None)
    assert "layers.2" not in (model / "model.safetensors.index.json").read_text(encoding="utf-8")


def test_a_disk_without_room_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(repeated_checkpoint.shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
    with pytest.raises(ConfigError, match="lower --layers, or name another directory with --scratch"):
        write_checkpoint(tiny(3), tmp_path, lambda _: None)
