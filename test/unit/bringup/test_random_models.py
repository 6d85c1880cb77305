"""Checkpoints of random weights have heads of 64 channels in the names that SGLang reads, and are made once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from bringup.engine_stages import FAMILIES_BESIDE
from sgl_batch.core.model_refusals import refusal
from sgl_batch.core.supported_models import GPU
from tiny_models.random_checkpoints import HUB, make_checkpoint
from tiny_models.random_families import for_gpu
from tiny_models.random_models import FAMILIES, make_random_model


@pytest.mark.parametrize("family", FAMILIES)
def test_heads_have_64_channels_which_are_those_of_the_model(family: str, tmp_path: Path, repo_root: Path) -> None:
    tokenizer = repo_root / "test" / "models" / "tiny-qwen3-moe"
    path = make_random_model(family, tmp_path, tokenizer)
    config = json.loads((path / "config.json").read_text())
    assert config["head_dim"] == 64
    # SGLang's Mixtral computes the channels of a head from these.
    assert config["hidden_size"] == 64 * config["num_attention_heads"]
    assert (path / "tokenizer.json").read_bytes() == (tokenizer / "tokenizer.json").read_bytes()
    written = (path / "model.safetensors").stat()
    assert make_random_model(family, tmp_path, tokenizer) == path
    assert (path / "model.safetensors").stat().st_mtime_ns == written.st_mtime_ns


@pytest.mark.parametrize("name", FAMILIES_BESIDE)
def test_a_family_for_a_gpu_has_heads_of_64_channels_or_more_in_bfloat16(
    name: str, tmp_path: Path, repo_root: Path
) -> None:
    path = make_checkpoint(
        for_gpu(name), HUB, tmp_path, repo_root / "test" / "models" / "tiny-qwen3-moe", dtype=torch.bfloat16
    )
    config = json.loads((Path(path) / "config.json").read_text())
    channels = config.get("kv_lora_rank") or config.get("head_dim") or 64
    assert channels >= 64
    if "kv_lora_rank" not in config:
        assert config["hidden_size"] == channels * config["num_attention_heads"]
    assert config["torch_dtype"] == "bfloat16"
    assert refusal(config, device=GPU) is None
