"""Checkpoints of random weights have heads of 64 channels in the names that SGLang reads, and are made once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

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
